"""The requests of evaluation and load tools, as they send them: lm-eval's local-completions, vllm bench serve."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import orjson
import pytest

from tests.gateway.conftest import Stand
from tests.gateway.mock_router import MODEL, tokenizer

PATH = "/v1/completions"
PAIRS = [("The capital of France is", " Paris."), ("naïve 漢字", " 😀 end"), ("one", " two three")]


def scores(answer: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """What lm-eval reads of an answer: the continuation's log-likelihood, and whether it is the greedy one."""
    result = []
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, context_lengths, strict=True):
        values = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        result.append((sum(values), greedy))
    return result


@pytest.mark.parametrize("as_ids", [True, False])
def test_loglikelihood_requests_of_lm_eval(stand: Stand, as_ids: bool) -> None:
    contexts = [tokenizer().encode(context) for context, _ in PAIRS]
    whole = [tokenizer().encode(context + end) for context, end in PAIRS]
    prompts: list[Any] = whole if as_ids else [context + end for context, end in PAIRS]
    body = {"model": MODEL, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    lengths = [len(ids) for ids in contexts]
    batch = stand.post(PATH, {**body, "prompt": prompts}).json()
    for choice, ids in zip(batch["choices"], whole, strict=True):
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["top_logprobs"]) == len(ids) + 1
        assert choice["logprobs"]["token_logprobs"][0] is None
    together = scores(batch, lengths)
    assert all(value < 0 for value, _ in together)
    # One by one, and with nothing generated: then there is no last token to drop.
    for prompt, length, pair in zip(prompts, lengths, together, strict=True):
        assert scores(stand.post(PATH, {**body, "prompt": prompt}).json(), [length]) == [pair]
        (choice,) = stand.post(PATH, {**body, "max_tokens": 0, "prompt": [prompt]}).json()["choices"]
        assert sum(choice["logprobs"]["token_logprobs"][length:]) == pytest.approx(pair[0])


def test_rolling_loglikelihood_starts_at_the_first_token(stand: Stand) -> None:
    """For perplexities lm-eval puts an end token before the text and takes one token of context."""
    ids = [2, *tokenizer().encode("red green blue")]
    body = {"model": MODEL, "prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    (choice,) = stand.post(PATH, body).json()["choices"]
    assert None not in choice["logprobs"]["token_logprobs"][1:-1]
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1


def test_generation_requests_of_lm_eval(stand: Stand) -> None:
    prompts = [tokenizer().encode(context) for context, _ in PAIRS]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 12, "temperature": 0, "stop": ["\n\n", "<|im_end|>"]}
    answer = stand.post(PATH, {**body, "seed": 1234}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert choice["text"] == stand.post(PATH, {**body, "prompt": prompt}).json()["choices"][0]["text"] != ""


async def load_one(http: httpx.AsyncClient, chat: bool, number: int, tokens: int) -> dict[str, Any]:
    """One request of `vllm bench serve`, read line by line as it does."""
    text = f"{number} " * 20
    body: dict[str, Any] = {
        "model": MODEL,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if chat:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}
        body |= {"max_completion_tokens": tokens}
    else:
        path = PATH
        body |= {"prompt": text, "max_tokens": tokens}
    began = time.perf_counter()
    seen: dict[str, Any] = {"text": "", "gaps": [], "usage": None}
    async with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line or line.startswith(":"):
                continue
            payload = line.removeprefix("data: ")
            if payload == "[DONE]":
                seen["done"] = True
                continue
            chunk = orjson.loads(payload)
            if chunk["choices"]:
                choice = chunk["choices"][0]
                seen["text"] += (choice["delta"].get("content") if chat else choice["text"]) or ""
                seen["gaps"].append(time.perf_counter() - began)
            elif chunk.get("usage"):
                seen["usage"] = chunk["usage"]
    return seen


@pytest.mark.parametrize("chat", [True, False])
async def test_a_load_of_streams_that_ignore_the_end(stand: Stand, chat: bool) -> None:
    """Every stream has exactly the tokens that were asked for, an end, and a usage to count by."""
    stand.router.token_delay = 0.001
    tokens, streams, at_once = 20, 48, 16
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=stand.url, timeout=60, trust_env=False) as http:

        async def one(number: int) -> dict[str, Any]:
            async with gate:
                return await load_one(http, chat, number, tokens)

        seen = await asyncio.gather(*(one(number) for number in range(streams)))
    assert stand.router.running == 0
    for result in seen:
        assert result.get("done") and result["text"]
        assert result["usage"]["completion_tokens"] == tokens
        assert result["gaps"] == sorted(result["gaps"]) and len(result["gaps"]) >= 2
    assert all(request.stop.ignore_eos for request in stand.router.requests)
