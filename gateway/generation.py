"""One Generate call as the gateway sees it: opened, read, and cancelled on every way out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from gateway.client import RouterClient
from gateway.errors import ApiError, from_tandem, internal
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.resume import BrokenStreamError, build_resume
from tandem.tracing import NULL_SPAN, Span, names

log = logging.getLogger("gateway.generation")

# Bytes of one stream that are kept for going on with it.
MAX_KEPT_BYTES = 8 * 1024 * 1024
MAX_RESUMES = 3
# Seconds that a broken stream waits for a router.
RESUME_WAIT_S = 30.0
T = TypeVar("T")


def _lost(error: TandemError) -> bool:
    """Whether the router itself went away, or is about to."""
    return error.code is grpc.StatusCode.UNAVAILABLE and error.reason in ("UNSPECIFIED", "ENGINE_DRAINING")


class Generation:
    """A Generate stream. `open` waits for *accepted*; `read` gives the events that follow, None at the end.

    A stream that breaks because the router was lost goes on at another one (or at the same one, restarted): the bytes
    that came are kept, and the contract's resume state is made from them.
    """

    __slots__ = (
        "_call",
        "_client",
        "_deadline",
        "_kept",
        "_kept_bytes",
        "_rest",
        "_resumes",
        "_span",
        "accepted",
        "request",
    )

    def __init__(self, client: RouterClient, request: pb.GenerateRequest, span: Span = NULL_SPAN) -> None:
        """span: of the HTTP request; the router's will be its child."""
        self._client = client
        self._span = span
        self.request = request
        self._call: Any = None
        self._rest: Sequence[pb.GenerateEvent] | None = None
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._resumes = 0
        self._deadline = time.monotonic() + request.timeout_ms / 1000 if request.timeout_ms else None
        self.accepted = pb.Accepted()

    async def open(self) -> pb.Accepted:
        """Sends the request and waits until an engine has accepted it.

        Raises:
            ApiError: it was refused, in HTTP's terms.
        """
        try:
            events = await self._first()
        except TandemError as error:
            if error.reason == "TOKENIZER_MISMATCH":
                self._client.forget_models()
            raise from_tandem(error) from None
        if not events or events[0].WhichOneof("event") != "accepted":
            self.cancel()
            raise internal()
        self.accepted = events[0].accepted
        self._rest = events[1:] if len(events) > 1 else None
        return self.accepted

    async def _first(self) -> Sequence[pb.GenerateEvent] | None:
        """The first events. A router that is lost before it has passed anything on costs one more try: by then the
        channel has found another one, or says at once that there is none."""
        self._call = self._client.generate(self.request, span=self._span)
        try:
            return await self._receive()
        except TandemError as error:
            if not _lost(error):
                raise
            if self._deadline is not None:
                self.request.timeout_ms = max(1, int((self._deadline - time.monotonic()) * 1000))
        self._call = self._client.generate(self.request, span=self._span)
        return await self._receive()

    async def read(self) -> Sequence[pb.GenerateEvent] | None:
        """The next events; None when the stream has ended well. Raises ApiError."""
        if self._rest is not None:
            events, self._rest = self._rest, None
            return events
        try:
            return await self._receive()
        except TandemError as error:
            return await self._resume(error)

    async def _receive(self) -> Sequence[pb.GenerateEvent] | None:
        try:
            data = await self._call.read()
        except grpc.RpcError as error:
            raise TandemError.from_rpc(error) from None
        if data is grpc.aio.EOF:
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                raise TandemError("UNSPECIFIED", "", code=code)
            return None
        if self._kept_bytes <= MAX_KEPT_BYTES:
            self._kept_bytes += len(data)
            self._kept.append(data)
        return pb.GenerateResponse.FromString(data).events

    async def _resume(self, error: TandemError) -> Sequence[pb.GenerateEvent] | None:
        """Goes on with a stream whose router was lost; raises the error's HTTP form where that cannot be."""
        if not _lost(error) or self._resumes >= MAX_RESUMES or self._kept_bytes > MAX_KEPT_BYTES:
            raise from_tandem(error)
        self._resumes += 1
        try:
            again = build_resume(self.request, self._kept)
        except BrokenStreamError as broken:
            log.error("stream cannot be resumed", extra={"request_id": self.request.request_id, "why": str(broken)})
            raise from_tandem(error) from None
        if again is None:
            return None
        if self._deadline is not None:
            again.timeout_ms = max(1, int((self._deadline - time.monotonic()) * 1000))
        log.warning("the router was lost; the stream goes on", extra={"request_id": self.request.request_id})
        self._span.event("resume", {names.REASON: "the router was lost", names.ATTEMPT: again.attempt})
        self._call = self._client.generate(again, wait_for_ready=True, span=self._span)
        try:
            async with asyncio.timeout(RESUME_WAIT_S):
                events = await self._receive()
        except TimeoutError:
            self.cancel()
            raise from_tandem(error) from None
        except TandemError as second:
            return await self._resume(second)
        # Its *accepted* repeats the first one.
        return events[1:] if events else events

    def cancel(self) -> None:
        """Ends the call; harmless when it has ended."""
        if self._call is not None:
            self._call.cancel()


@dataclass(slots=True)
class CollectedChoice:
    """All that one choice produced."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    scores: list[pb.TokenLogprob] = field(default_factory=list)
    finished: pb.Finished | None = None


@dataclass(slots=True)
class Collected:
    """A whole answer."""

    accepted: pb.Accepted
    choices: list[CollectedChoice]
    usage: pb.Usage
    prompt_scores: list[pb.TokenLogprob]


async def collect(generation: Generation, first_token: Any = None) -> Collected:
    """Reads a generation to its end. `first_token()` is called when the first delta arrives."""
    accepted = await generation.open()
    n = generation.request.n or 1
    result = Collected(accepted, [CollectedChoice() for _ in range(n)], pb.Usage(), [])
    texts: list[list[str]] = [[] for _ in range(n)]
    while (events := await generation.read()) is not None:
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "delta":
                delta = event.delta
                choice = result.choices[delta.choice]
                texts[delta.choice].append(delta.text)
                choice.ids.extend(delta.ids)
                choice.scores.extend(delta.logprobs)
                if first_token is not None:
                    first_token()
                    first_token = None
            elif kind == "finished":
                result.choices[event.finished.choice].finished = event.finished
            elif kind == "usage":
                result.usage = event.usage
            elif kind == "prompt":
                result.prompt_scores = list(event.prompt.tokens)
    for choice, pieces in zip(result.choices, texts, strict=True):
        choice.text = "".join(pieces)
        if choice.finished is None:
            raise internal()
    return result


def scores_of_text(choice: CollectedChoice) -> list[pb.TokenLogprob]:
    """Scores without that of a stop token whose text is not part of the answer: tokens of a chat join to its text."""
    done = choice.finished
    ended = done is not None and done.HasField("stop_token_id") and len(choice.scores) == len(choice.ids)
    if ended and choice.ids and done is not None and choice.ids[-1] == done.stop_token_id:
        return choice.scores[:-1]
    return choice.scores


async def gather_all(generations: list[Generation], work: Callable[[Generation], Coroutine[Any, Any, T]]) -> list[T]:
    """Runs `work(generation)` for all at once; the first failure cancels the rest. Cancels calls on every way out."""
    if len(generations) == 1:
        try:
            return [await work(generations[0])]
        finally:
            generations[0].cancel()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(generation)) for generation in generations]
        return [task.result() for task in tasks]
    except* ApiError as failed:
        raise failed.exceptions[0] from None
    finally:
        for generation in generations:
            generation.cancel()


FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "abort",
    pb.FINISH_REASON_ERROR: "error",
}


def finish_reason(finished: pb.Finished) -> str:
    return FINISH_REASONS.get(finished.reason, "stop")


def stop_reason(finished: pb.Finished) -> str | int | None:
    """vLLM's stop_reason: the stop string or id of the request that matched."""
    kind = finished.WhichOneof("matched")
    return getattr(finished, kind) if kind else None


def usage_dict(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def fingerprint(accepted: pb.Accepted) -> str:
    """system_fingerprint: what the answer's bits depend on."""
    if not accepted.numerics_id:
        return "best effort"
    return accepted.numerics_id if accepted.batch_invariant else f"best effort {accepted.numerics_id}"


def receipt_dict(receipt: pb.Receipt) -> dict[str, Any]:
    """The receipt under the contract's names."""
    result: dict[str, Any] = {}
    for descriptor in pb.Receipt.DESCRIPTOR.fields:
        value = getattr(receipt, descriptor.name)
        if descriptor.name.endswith("_by_proposer"):
            value = dict(value)
        elif descriptor.name == "accepted_by_position":
            value = list(value)
        result[descriptor.name] = value
    return result
