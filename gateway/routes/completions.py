"""POST /v1/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.body import parse_body
from gateway.client import LoadedTokenizer
from gateway.completion_stream import CompletionStream
from gateway.context import Gateway, RequestContext, context_of, gateway_of
from gateway.docs import describe
from gateway.errors import bad
from gateway.generation import (
    Collected,
    CollectedChoice,
    Generation,
    collect,
    fingerprint,
    finish_reason,
    gather_all,
    receipt_dict,
    stop_reason,
    usage_dict,
)
from gateway.logprobs import LegacyLogprobs, prompt_logprobs
from gateway.params import check_ids, fit_context, structured_output, truncated
from gateway.schemas.completions import CompletionBody
from gateway.text import account, admit, build_request, encode, new_id, run_plain, start_stream
from tandem.inference.v1 import inference_pb2 as pb

router = APIRouter()

DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class PromptJob:
    """One prompt of a request."""

    ids: list[int]
    echo: str
    generation: Generation


@dataclass(slots=True)
class CompletionJob:
    """A request made ready: one generation per prompt."""

    body: CompletionBody
    model: str
    info: pb.ModelInfo
    loaded: LoadedTokenizer
    prompts: list[PromptJob]
    created: int
    id: str


@router.post(
    "/v1/completions",
    **describe("Continue prompts", CompletionBody, ok="Completion", errors=(404,), stream=True),
)
async def completions(request: Request) -> Response:
    gateway, context = gateway_of(request), context_of(request)
    settings = gateway.settings
    body = await parse_body(request, CompletionBody, settings.max_body_bytes, settings.body_timeout)
    job = await prepare(request, gateway, context, body)
    generations = [prompt.generation for prompt in job.prompts]
    if body.stream:
        stream = CompletionStream(job, gateway, context)
        return await start_stream(request, gateway, context, generations, stream.chunks)

    async def work() -> list[Collected]:
        return await gather_all(generations, lambda one: collect(one, context.first_token))

    collected = await run_plain(request, gateway, work)
    return Response(orjson.dumps(_answer(job, collected, gateway, context)), media_type="application/json")


async def prepare(request: Request, gateway: Gateway, context: RequestContext, body: CompletionBody) -> CompletionJob:
    """One generation per prompt. Raises ApiError."""
    prompts = body.prompt
    if len(prompts) > gateway.settings.max_prompts:
        raise bad(
            f"prompt holds {len(prompts)} prompts, but at most {gateway.settings.max_prompts} are allowed.", "prompt"
        )
    info = await gateway.client.resolve(body.model)
    loaded = await gateway.client.tokenizer(info)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    structured = structured_output(body)
    jobs = []
    vocab = info.vocab_size or loaded.tokenizer.vocab_size
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = await encode(loaded, prompt, body.add_special_tokens is not False)
        else:
            ids = check_ids(prompt, vocab, "prompt")
        kept = truncated(ids, body.truncate_prompt_tokens, info.max_model_len, max_tokens)
        if not kept:
            raise bad("prompt is empty: the model needs at least one token.", "prompt")
        fit_context(len(kept), max_tokens, info.max_model_len, "prompt")
        whole = (isinstance(prompt, str) and kept is ids) or len(kept) == len(ids)
        echo = ""
        if body.echo:
            echo = prompt if isinstance(prompt, str) and whole else loaded.tokenizer.decode(kept, skip_special=False)
        made = build_request(
            request,
            gateway,
            context,
            body,
            info,
            loaded,
            kept,
            max_tokens=max_tokens,
            n=max(body.best_of or 1, body.n or 1),
            logprobs=_wanted_logprobs(body),
            prompt_logprobs=_wanted_prompt_logprobs(body),
            structured=structured,
        )
        jobs.append(PromptJob(kept, echo, Generation(gateway.client, made, context.span)))
    admit(gateway, context, info, sum(len(job.ids) for job in jobs))
    return CompletionJob(body, body.model or info.name, info, loaded, jobs, int(time.time()), new_id("cmpl"))


def _wanted_logprobs(body: CompletionBody) -> int | None:
    if body.logprobs is None and (body.best_of or 1) > (body.n or 1):
        # best_of ranks by the mean logprob.
        return 0
    return body.logprobs


def _wanted_prompt_logprobs(body: CompletionBody) -> int | None:
    if body.echo and body.logprobs is not None:
        return max(body.logprobs, body.prompt_logprobs or 0)
    return body.prompt_logprobs


def best_choices(choices: list[CollectedChoice], n: int) -> list[CollectedChoice]:
    """The n choices of the highest mean logprob per token, best first."""
    if len(choices) <= n:
        return choices

    def mean(choice: CollectedChoice) -> float:
        return sum(score.logprob for score in choice.scores) / max(1, len(choice.scores))

    return sorted(choices, key=mean, reverse=True)[:n]


def _answer(
    job: CompletionJob, collected: list[Collected], gateway: Gateway, context: RequestContext
) -> dict[str, Any]:
    """The text_completion object; books the usage."""
    body = job.body
    choices: list[dict[str, Any]] = []
    for prompt, result in zip(job.prompts, collected, strict=True):
        for choice in best_choices(result.choices, body.n or 1):
            choices.append(_choice(job, prompt, result, choice, len(choices)))
    usages = [result.usage for result in collected]
    context.engine = collected[0].accepted.engine
    account(gateway, context, usages, [choice["finish_reason"] for choice in choices])
    answer: dict[str, Any] = {
        "id": job.id,
        "object": "text_completion",
        "created": job.created,
        "model": job.model,
        "system_fingerprint": fingerprint(collected[0].accepted),
        "choices": choices,
        "usage": usage_dict(context.prompt_tokens, context.completion_tokens, context.cached_tokens),
    }
    receipts = [receipt_dict(usage.receipt) for usage in usages if usage.HasField("receipt")]
    if body.receipt and receipts:
        answer["receipt"] = receipts[0] if len(receipts) == 1 else receipts
    return answer


def _choice(
    job: CompletionJob, prompt: PromptJob, result: Collected, choice: CollectedChoice, index: int
) -> dict[str, Any]:
    body, tokenizer = job.body, job.loaded.tokenizer
    assert choice.finished is not None
    scores = None
    if body.logprobs is not None:
        writer = LegacyLogprobs(tokenizer, body.logprobs)
        scores = writer.take([*(result.prompt_scores if body.echo else ()), *choice.scores])
    entry: dict[str, Any] = {
        "index": index,
        "text": prompt.echo + choice.text,
        "logprobs": scores,
        "finish_reason": finish_reason(choice.finished),
        "stop_reason": stop_reason(choice.finished),
    }
    if body.prompt_logprobs is not None:
        entry["prompt_logprobs"] = prompt_logprobs(tokenizer, result.prompt_scores, body.prompt_logprobs)
    if body.return_token_ids:
        entry["token_ids"] = choice.ids
        entry["prompt_token_ids"] = prompt.ids
    return entry
