"""The stream of /v1/completions, over one or several prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import orjson

from gateway.chunks import ChunkWriter
from gateway.context import Gateway, RequestContext
from gateway.generation import Generation, fingerprint, finish_reason, receipt_dict, stop_reason
from gateway.logprobs import LegacyLogprobs, prompt_logprobs
from gateway.sse import DONE
from gateway.text import account
from tandem.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from gateway.routes.completions import CompletionJob

Events = Sequence[pb.GenerateEvent]
# Messages that may wait per merged stream; beyond that its call is not read, so gRPC holds it back.
QUEUE = 8


async def merged(generations: list[Generation]) -> AsyncIterator[tuple[int, Events]]:
    """Events of several generations as they come, with the generation's number. Raises the first ApiError."""
    if len(generations) == 1:
        while (events := await generations[0].read()) is not None:
            yield 0, events
        return
    queue: asyncio.Queue[tuple[int, Events | BaseException | None]] = asyncio.Queue(QUEUE * len(generations))

    async def pump(number: int, generation: Generation) -> None:
        try:
            while (events := await generation.read()) is not None:
                await queue.put((number, events))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.create_task(pump(number, generation)) for number, generation in enumerate(generations)]
    left = len(tasks)
    try:
        while left:
            number, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Choice:
    """What one choice of the stream has to remember."""

    __slots__ = ("finish", "logprobs")

    def __init__(self, logprobs: LegacyLogprobs | None) -> None:
        self.logprobs = logprobs
        self.finish = ""


class CompletionStream:
    """Chunks of one request; choices of prompt p are numbered from p × n."""

    def __init__(self, job: CompletionJob, gateway: Gateway, context: RequestContext) -> None:
        self._job = job
        self._gateway = gateway
        self._context = context
        self._body = job.body
        self._n = job.body.n or 1
        self._choices = [
            _Choice(LegacyLogprobs(job.loaded.tokenizer, job.body.logprobs) if job.body.logprobs is not None else None)
            for _ in range(self._n * len(job.prompts))
        ]
        self._usages = [pb.Usage() for _ in job.prompts]
        self._last_delta: float | None = None
        self._itl = gateway.metrics.itl.labels(context.model)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of the stream, as bytes. Raises ApiError where a generation fails."""
        generations = [prompt.generation for prompt in self._job.prompts]
        writer = self._open(generations)
        if self._body.echo and self._body.logprobs is None:
            yield b"".join(self._echo(writer, number) for number in range(len(generations)))
        async for number, events in merged(generations):
            out = b"".join(self._event(writer, number, event) for event in events)
            if out:
                yield out
        account(self._gateway, self._context, self._usages, [choice.finish for choice in self._choices])
        writer.prompt_tokens = self._context.prompt_tokens
        writer.completion_tokens = self._context.completion_tokens
        writer.cached_tokens = self._context.cached_tokens
        receipts = []
        if self._body.receipt:
            receipts = [receipt_dict(usage.receipt) for usage in self._usages if usage.HasField("receipt")]
        yield writer.last((receipts[0] if len(receipts) == 1 else receipts) if receipts else None) + DONE

    def _open(self, generations: list[Generation]) -> ChunkWriter:
        accepted = generations[0].accepted
        self._context.engine = accepted.engine
        head = {
            "id": self._job.id,
            "object": "text_completion",
            "created": self._job.created,
            "model": self._job.model,
            "system_fingerprint": fingerprint(accepted),
        }
        writer = ChunkWriter(head, self._body.include_usage, self._body.continuous_usage)
        writer.prompt_tokens = sum(one.accepted.prompt_tokens for one in generations)
        writer.cached_tokens = sum(one.accepted.cached_tokens for one in generations)
        return writer

    def _echo(self, writer: ChunkWriter, number: int, scores: list[pb.TokenLogprob] | None = None) -> bytes:
        """The prompt, as the first text of each of its choices."""
        payload = _text(self._job.prompts[number].echo)
        out = b""
        for index in range(number * self._n, (number + 1) * self._n):
            logprobs = self._choices[index].logprobs
            out += writer.choice(index, payload, logprobs.take(scores) if logprobs and scores else None)
        return out

    def _event(self, writer: ChunkWriter, number: int, event: pb.GenerateEvent) -> bytes:
        kind = event.WhichOneof("event")
        if kind == "delta":
            return self._on_delta(writer, number, event.delta)
        if kind == "finished":
            return self._on_finished(writer, number, event.finished)
        if kind == "usage":
            self._usages[number] = event.usage
        elif kind == "prompt":
            return self._on_prompt(writer, number, event.prompt)
        return b""

    def _on_prompt(self, writer: ChunkWriter, number: int, prompt: pb.PromptScores) -> bytes:
        out = b""
        if self._body.echo and self._body.logprobs is not None:
            out = self._echo(writer, number, list(prompt.tokens))
        if self._body.prompt_logprobs is not None:
            scores = prompt_logprobs(self._job.loaded.tokenizer, prompt.tokens, self._body.prompt_logprobs)
            for index in range(number * self._n, (number + 1) * self._n):
                out += writer.choice(index, b'"text":""', extra={"prompt_logprobs": scores})
        return out

    def _on_delta(self, writer: ChunkWriter, number: int, delta: pb.Delta) -> bytes:
        now = time.monotonic()
        if self._last_delta is None:
            self._context.first_token()
        else:
            self._itl.observe(now - self._last_delta)
        self._last_delta = now
        index = number * self._n + delta.choice
        choice = self._choices[index]
        writer.completion_tokens += len(delta.ids)
        logprobs = None
        if choice.logprobs is not None:
            logprobs = choice.logprobs.take(delta.logprobs) if delta.logprobs else None
        extra = {"token_ids": list(delta.ids)} if self._body.return_token_ids and delta.ids else None
        if not delta.text and logprobs is None and extra is None:
            return b""
        return writer.choice(index, _text(delta.text), logprobs, None, extra)

    def _on_finished(self, writer: ChunkWriter, number: int, finished: pb.Finished) -> bytes:
        index = number * self._n + finished.choice
        choice = self._choices[index]
        choice.finish = finish_reason(finished)
        return writer.choice(index, b'"text":""', None, choice.finish, {"stop_reason": stop_reason(finished)})


def _text(text: str) -> bytes:
    return b'"text":' + orjson.dumps(text)
