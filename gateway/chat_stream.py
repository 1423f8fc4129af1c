"""The stream of a chat completion: role chunk, deltas, finish chunk, optional usage chunk, [DONE]."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import orjson

from gateway.chat_job import ChatJob, final_finish
from gateway.chunks import ChunkWriter
from gateway.context import Gateway, RequestContext
from gateway.conversation import content_text
from gateway.generation import fingerprint, finish_reason, receipt_dict, stop_reason
from gateway.logprobs import chat_entries, prompt_logprobs
from gateway.sse import DONE
from gateway.text import account, new_id
from gateway.tools.base import CallStart, Content, Piece, Reasoning
from tandem.inference.v1 import inference_pb2 as pb


class StreamedChoice:
    """What one choice of a stream has to remember."""

    __slots__ = ("arguments", "calls", "finish", "held_ids", "held_scores", "held_sources", "parser", "stop_score")

    def __init__(self, job: ChatJob) -> None:
        self.parser = job.plan.make_parser(job.prompt)
        self.calls = 0
        # Those of the last call so far.
        self.arguments = ""
        self.finish = ""
        # Logprobs and ids of tokens whose text is not out yet.
        self.held_scores: list[pb.TokenLogprob] = []
        self.held_ids: list[int] = []
        self.held_sources: list[str] = []
        # The score of a token that may turn out to be the one that ended the text.
        self.stop_score: pb.TokenLogprob | None = None

    def take_scores(self, delta: pb.Delta, stop_ids: frozenset[int]) -> None:
        """Keeps the delta's logprobs; the last one waits if its token may be a stop token."""
        if self.stop_score is not None:
            self.held_scores.append(self.stop_score)
            self.stop_score = None
        self.held_scores.extend(delta.logprobs)
        if self.held_scores and delta.ids and delta.ids[-1] in stop_ids:
            self.stop_score = self.held_scores.pop()

    def settle(self, finished: pb.Finished) -> None:
        """At the end: the waiting score stays unless its token ended the text."""
        if self.stop_score is not None and not finished.HasField("stop_token_id"):
            self.held_scores.append(self.stop_score)
        self.stop_score = None


class ChatStream:
    """Chunks of one chat."""

    def __init__(self, job: ChatJob, gateway: Gateway, context: RequestContext) -> None:
        self._job = job
        self._gateway = gateway
        self._context = context
        self._body = job.body
        self._choices = [StreamedChoice(job) for _ in range(job.body.n or 1)]
        self._stop_ids = job.loaded.stop_ids | frozenset(job.body.stop_token_ids or ())
        self._wants_ids = bool(job.body.return_token_ids)
        self._wants_sources = bool(job.body.return_token_sources)
        self._writer: ChunkWriter | None = None
        self._usage = pb.Usage()
        self._last_delta: float | None = None
        self._itl = gateway.metrics.itl.labels(context.model)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events of the stream, as bytes. Raises ApiError where the generation fails."""
        generation = self._job.generation
        accepted = generation.accepted
        self._context.engine = accepted.engine
        writer = self._writer = self._open(accepted)
        yield b"".join(self._first(writer, index) for index in range(len(self._choices)))
        while (events := await generation.read()) is not None:
            out = b"".join(self._event(writer, event) for event in events)
            if out:
                yield out
        account(self._gateway, self._context, [self._usage], [choice.finish for choice in self._choices])
        receipt = receipt_dict(self._usage.receipt) if self._body.receipt and self._usage.HasField("receipt") else None
        yield writer.last(receipt) + DONE

    def _open(self, accepted: pb.Accepted) -> ChunkWriter:
        head = {
            "id": new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": self._job.created,
            "model": self._job.model,
            "system_fingerprint": fingerprint(accepted),
        }
        writer = ChunkWriter(head, self._body.include_usage, self._body.continuous_usage)
        writer.prompt_tokens = accepted.prompt_tokens
        writer.cached_tokens = accepted.cached_tokens
        return writer

    def _first(self, writer: ChunkWriter, index: int) -> bytes:
        content = ""
        if self._body.echo:
            content = content_text(self._body.messages[-1].content, "messages")
        extra = {"prompt_token_ids": self._job.ids} if self._wants_ids else None
        return writer.choice(index, _delta({"role": "assistant", "content": content}), extra=extra)

    def _event(self, writer: ChunkWriter, event: pb.GenerateEvent) -> bytes:
        kind = event.WhichOneof("event")
        if kind == "delta":
            return self._on_delta(writer, event.delta)
        if kind == "finished":
            return self._on_finished(writer, event.finished)
        if kind == "usage":
            self._usage = event.usage
            writer.prompt_tokens = event.usage.prompt_tokens
            writer.completion_tokens = event.usage.completion_tokens
            writer.cached_tokens = event.usage.cached_tokens
        elif kind == "prompt" and self._body.prompt_logprobs is not None:
            scores = prompt_logprobs(self._job.loaded.tokenizer, event.prompt.tokens, self._body.prompt_logprobs)
            return writer.choice(0, b'"delta":{}', extra={"prompt_logprobs": scores})
        return b""

    def _on_delta(self, writer: ChunkWriter, delta: pb.Delta) -> bytes:
        now = time.monotonic()
        if self._last_delta is None:
            self._context.first_token()
        else:
            self._itl.observe(now - self._last_delta)
        self._last_delta = now
        choice = self._choices[delta.choice]
        writer.completion_tokens += len(delta.ids)
        if self._body.logprobs:
            choice.take_scores(delta, self._stop_ids)
        if self._wants_ids:
            choice.held_ids.extend(delta.ids)
        if self._wants_sources:
            choice.held_sources += ["draft" if delta.drafted >> i & 1 else "engine" for i in range(len(delta.ids))]
        if choice.parser is not None:
            return self._pieces(writer, delta.choice, choice.parser.feed(delta.text) if delta.text else [])
        if delta.text and not (self._body.logprobs or self._wants_ids or self._wants_sources):
            return writer.choice(delta.choice, b'"delta":{"content":' + orjson.dumps(delta.text) + b"}")
        if delta.text or choice.held_scores or choice.held_ids or choice.held_sources:
            return self._chunk(writer, delta.choice, {"content": delta.text})
        return b""

    def _pieces(self, writer: ChunkWriter, index: int, pieces: list[Piece]) -> bytes:
        out = b""
        for piece in pieces:
            rendered = self._render(self._choices[index], piece)
            if rendered is not None:
                out += self._chunk(writer, index, rendered)
        return out

    def _render(self, choice: StreamedChoice, piece: Piece) -> dict[str, Any] | None:
        """A piece as a delta; None for what the client does not want."""
        if isinstance(piece, Content):
            # Blank lines between calls are no answer.
            return None if choice.calls and not piece.text.strip() else {"content": piece.text}
        if isinstance(piece, Reasoning):
            return None if self._body.include_reasoning is False else {"reasoning_content": piece.text}
        if self._body.parallel_tool_calls is False and piece.index > 0:
            return None
        if isinstance(piece, CallStart):
            choice.calls += 1
            choice.arguments = ""
            function = {"name": piece.name, "arguments": ""}
            return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}
        choice.arguments += piece.text
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _chunk(self, writer: ChunkWriter, index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        """A chunk, with the logprobs and ids that waited for one."""
        logprobs, extra = self._held(self._choices[index])
        return writer.choice(index, _delta(delta), logprobs, finish, extra or None)

    def _held(self, choice: StreamedChoice) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """What waited for a chunk: logprobs, and members such as token_ids."""
        logprobs: dict[str, Any] | None = None
        extra: dict[str, Any] = {}
        if choice.held_scores:
            entries = chat_entries(self._job.loaded.tokenizer, choice.held_scores, self._body.top_logprobs or 0)
            logprobs, choice.held_scores = {"content": entries}, []
        if choice.held_ids:
            extra["token_ids"], choice.held_ids = choice.held_ids, []
        if choice.held_sources:
            extra["token_sources"], choice.held_sources = choice.held_sources, []
        return logprobs, extra

    def _on_finished(self, writer: ChunkWriter, finished: pb.Finished) -> bytes:
        index = finished.choice
        choice = self._choices[index]
        choice.settle(finished)
        out = b""
        if choice.parser is not None:
            out = self._pieces(writer, index, choice.parser.finish())
        choice.finish = final_finish(finish_reason(finished), choice.calls, self._job.plan, choice.arguments)
        logprobs, held = self._held(choice)
        extra = {"stop_reason": stop_reason(finished), **held}
        return out + writer.choice(index, b'"delta":{}', logprobs, choice.finish, extra)


def _delta(value: dict[str, Any]) -> bytes:
    return b'"delta":' + orjson.dumps(value)
