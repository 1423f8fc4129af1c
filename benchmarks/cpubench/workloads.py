"""The workloads W1 to W4, driven over HTTP against any server with OpenAI's /v1/completions."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from tandem.tokenizer import Tokenizer


def _words(text: str) -> list[str]:
    return text.split()


_SUBJECTS = _words("river garden teacher village ocean painter station captain museum farmer bridge student window")
_VERBS = _words("visited described repaired studied measured discovered carried followed crossed built watched")
_ADJECTIVES = _words("old quiet bright narrow famous wooden distant modern curious small golden heavy ancient busy")
_TIMES = (
    "in the spring",
    "last winter",
    "every morning",
    "in 1987",
    "on a Tuesday",
    "late at night",
    "after the storm",
)


def _sentence(rng: random.Random) -> str:
    a, b = rng.choice(_ADJECTIVES), rng.choice(_ADJECTIVES)
    first, second = rng.choice(_SUBJECTS), rng.choice(_SUBJECTS)
    return f"The {a} {first} {rng.choice(_VERBS)} {rng.randint(2, 99)} {b} {second}s {rng.choice(_TIMES)}."


class Prompts:
    """Texts of an exact number of tokens, made from a key: other keys, other words from the start."""

    def __init__(self, tokenizer: Tokenizer, salt: str) -> None:
        self._tokenizer, self._salt = tokenizer, salt

    def text(self, tokens: int, key: str) -> str:
        rng = random.Random(f"{self._salt}/{key}")
        ids: list[int] = []
        while len(ids) < tokens + 8:
            ids += self._tokenizer.encode(" " + _sentence(rng))
        for size in range(tokens, 0, -1):
            text = self._tokenizer.decode(ids[:size])
            if len(self._tokenizer.encode(text)) <= tokens:
                return text
        raise ValueError(f"no text of {tokens} tokens")


@dataclass
class Answer:
    """One streamed answer; times in seconds from the request."""

    ttft: float = 0.0
    last: float = 0.0
    tokens: int = 0
    error: str = ""


@dataclass
class Result:
    """One run of one workload."""

    workload: str
    values: dict[str, float]
    errors: list[str] = field(default_factory=list)


class Client:
    """Streams completions from one server."""

    def __init__(self, url: str, model: str, extra: dict[str, Any]) -> None:
        self._url, self._model, self._extra = url, model, extra

    async def one(self, http: httpx.AsyncClient, prompt: str, tokens: int, **options: Any) -> Answer:
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            **self._extra, **options,
        }  # fmt: skip
        start, answer = time.perf_counter(), Answer()
        try:
            async with http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    return Answer(error=f"HTTP {response.status_code}: {response.text[:200]}")
                async for line in response.aiter_lines():
                    self._take(line, time.perf_counter() - start, answer)
        except httpx.HTTPError as error:
            return Answer(error=repr(error))
        # Servers may send several tokens in a chunk: with stop tokens ignored, all that were asked for came.
        answer.tokens = tokens if answer.tokens else 0
        return answer if answer.tokens else Answer(error="no tokens")

    @staticmethod
    def _take(line: str, now: float, answer: Answer) -> None:
        if not line.startswith("data:") or line.endswith("[DONE]"):
            return
        event = json.loads(line[5:])
        if "error" in event:
            raise httpx.RemoteProtocolError(str(event["error"])[:200])
        if any(choice.get("text") for choice in event.get("choices") or []):
            answer.ttft = answer.ttft or now
            answer.last = now
            answer.tokens += 1

    async def many(
        self, prompts: list[str], tokens: int, concurrency: int, **options: Any
    ) -> tuple[list[Answer], float]:
        """All prompts, at most `concurrency` at once; answers and seconds of the whole."""
        waiting = list(enumerate(prompts))[::-1]
        answers: list[Answer] = [Answer() for _ in prompts]
        per_row = options.pop("per_row", None)

        async def worker(http: httpx.AsyncClient) -> None:
            while waiting:
                index, prompt = waiting.pop()
                own = per_row(index) if per_row else {}
                answers[index] = await self.one(http, prompt, tokens, **options, **own)

        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(timeout=900, limits=limits) as http:
            start = time.perf_counter()
            await asyncio.gather(*[worker(http) for _ in range(concurrency)])
            return answers, time.perf_counter() - start


def _summary(name: str, answers: list[Answer], wall: float) -> Result:
    good = [answer for answer in answers if not answer.error]
    errors = [answer.error for answer in answers if answer.error]
    if not good:
        return Result(name, {}, errors)
    decode = [(a.tokens - 1) / (a.last - a.ttft) for a in good if a.tokens > 1 and a.last > a.ttft]
    values = {
        "out_tok_s": sum(a.tokens for a in good) / wall,
        "ttft_ms": statistics.median(a.ttft for a in good) * 1e3,
    }
    if decode:
        values["decode_tok_s"] = statistics.median(decode)
    return Result(name, values, errors)


def _sampled(index: int) -> dict[str, Any]:
    return {"seed": index, **({"logprobs": 5} if index % 4 == 0 else {})}


async def run(name: str, client: Client, prompts: Prompts, scale: float) -> Result:
    """Runs one workload. scale shortens all counts for quick looks; 1 is the workload as named."""
    count = lambda full: max(2, round(full * scale))  # noqa: E731
    if name == "w1":
        answers, wall = await client.many([prompts.text(128, f"w1/{i}") for i in range(count(5))], 128, 1)
    elif name == "w2":
        answers, wall = await client.many([prompts.text(128, f"w2/{i}") for i in range(count(64))], 64, 32)
    elif name == "w2s":
        texts = [prompts.text(128, f"w2s/{i}") for i in range(count(64))]
        answers, wall = await client.many(texts, 64, 32, temperature=0.8, top_p=0.95, per_row=_sampled)
    elif name == "w3":
        prefix = prompts.text(1024, "w3/prefix")
        for part in ("cold", "warm"):
            texts = [f"{prefix} {prompts.text(32, f'w3/{part}/{i}')}" for i in range(count(32))]
            answers, wall = await client.many(texts, 32, 8)
    elif name == "w4":
        answers, wall = await client.many([prompts.text(4096, "w4")], 1, 1)
    else:
        raise ValueError(f"unknown workload {name!r}: w1, w2, w2s, w3 and w4 exist")
    return _summary(name, answers, wall)
