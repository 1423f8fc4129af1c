"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.body import parse_body
from gateway.chat_job import ChatJob, prepare_chat, split_answer
from gateway.chat_stream import ChatStream
from gateway.context import Gateway, RequestContext, context_of, gateway_of
from gateway.conversation import content_text
from gateway.docs import describe
from gateway.generation import (
    Collected,
    collect,
    fingerprint,
    gather_all,
    receipt_dict,
    scores_of_text,
    stop_reason,
    usage_dict,
)
from gateway.logprobs import chat_entries, prompt_logprobs
from gateway.schemas.chat import ChatBody
from gateway.text import account, new_id, run_plain, start_stream

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **describe("Answer a conversation", ChatBody, ok="ChatCompletion", errors=(404,), stream=True),
)
async def chat_completions(request: Request) -> Response:
    gateway, context = gateway_of(request), context_of(request)
    settings = gateway.settings
    body = await parse_body(request, ChatBody, settings.max_body_bytes, settings.body_timeout)
    job = await prepare_chat(request, gateway, context, body)
    if body.stream:
        stream = ChatStream(job, gateway, context)
        return await start_stream(request, gateway, context, [job.generation], stream.chunks)

    async def work() -> list[Collected]:
        return await gather_all([job.generation], lambda one: collect(one, context.first_token))

    (collected,) = await run_plain(request, gateway, work)
    answer = chat_answer(job, collected, gateway, context)
    return Response(orjson.dumps(answer), media_type="application/json")


def chat_answer(job: ChatJob, collected: Collected, gateway: Gateway, context: RequestContext) -> dict[str, Any]:
    """The chat.completion object; books the usage."""
    body, usage = job.body, collected.usage
    choices: list[dict[str, Any]] = []
    for index, choice in enumerate(collected.choices):
        answer = split_answer(job, choice)
        assert choice.finished is not None
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.calls:
            message["tool_calls"] = answer.calls
            message["content"] = answer.content or None
        if answer.reasoning and body.include_reasoning is not False:
            message["reasoning_content"] = answer.reasoning
        if body.echo and isinstance(message["content"], str):
            message["content"] = _echoed(body) + message["content"]
        scores = None
        if body.logprobs:
            scores = {"content": chat_entries(job.loaded.tokenizer, scores_of_text(choice), body.top_logprobs or 0)}
        entry: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": scores,
            "finish_reason": answer.finish,
            "stop_reason": stop_reason(choice.finished),
        }
        if body.return_token_ids:
            entry["token_ids"] = choice.ids
        choices.append(entry)
    context.engine = collected.accepted.engine
    account(gateway, context, [usage], [entry["finish_reason"] for entry in choices])
    result: dict[str, Any] = {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": job.created or int(time.time()),
        "model": job.model,
        "system_fingerprint": fingerprint(collected.accepted),
        "choices": choices,
        "usage": usage_dict(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
    }
    if body.return_token_ids:
        result["prompt_token_ids"] = job.ids
    if body.prompt_logprobs is not None:
        result["prompt_logprobs"] = prompt_logprobs(job.loaded.tokenizer, collected.prompt_scores, body.prompt_logprobs)
    if body.receipt and usage.HasField("receipt"):
        result["receipt"] = receipt_dict(usage.receipt)
    return result


def _echoed(body: ChatBody) -> str:
    return content_text(body.messages[-1].content, "messages")
