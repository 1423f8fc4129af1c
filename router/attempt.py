"""One call of a request to one engine: what its answer says, and what it means when it breaks."""

from __future__ import annotations

import time
from typing import Any, Protocol

import grpc

from router.retry import Failure
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.resume import split_events


class Attempt:
    """A running call that can be given up from outside."""

    def __init__(self) -> None:
        self.call: Any = None
        self.hung = ""

    def give_up(self, reason: str) -> None:
        self.hung = reason
        if self.call is not None:
            self.call.cancel()


class Listener(Protocol):
    """Who wants to know how an attempt begins."""

    def on_accepted(self, accepted: pb.Accepted) -> bool:
        """The engine took the request. Returns whether the client should see that."""
        ...

    def on_prompt(self) -> bool:
        """Prompt scores came. Returns whether the client should see them."""
        ...

    def on_first_token(self, cached_tokens: int, sent_at: float) -> None:
        """The first token came; the call was sent at `sent_at` (monotonic seconds)."""
        ...


class AttemptStream:
    """Looks at an attempt's answer only until its first token; from then on bytes pass unread."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._sent_at = time.monotonic()
        self._started = False
        self._cached_tokens = 0
        self._last = b""
        self.accepted = False

    def filter(self, chunk: bytes) -> bytes:
        """What of a message the client should get.

        Raises:
            BrokenStreamError: it is no serialized GenerateResponse.
        """
        self._last = chunk or self._last
        return chunk if self._started else self._first_chunks(chunk)

    def _first_chunks(self, chunk: bytes) -> bytes:
        kept: list[bytes] = []
        for kind, start, end in split_events(chunk):
            part = chunk[start:end]
            if kind == "accepted":
                self.accepted = True
                accepted = pb.GenerateResponse.FromString(part).events[0].accepted
                self._cached_tokens = accepted.cached_tokens
                if not self._listener.on_accepted(accepted):
                    continue
            elif kind == "prompt":
                if not self._listener.on_prompt():
                    continue
            elif not self._started:
                self._started = True
                self._listener.on_first_token(self._cached_tokens, self._sent_at)
            kept.append(part)
        return b"".join(kept)

    def finished_well(self) -> bool:
        """Whether the last message held the usage event, which ends every complete stream."""
        return any(kind == "usage" for kind, _, _ in split_events(self._last))

    def failed(self, error: grpc.aio.AioRpcError) -> Failure:
        """What the engine's status allows."""
        typed = TandemError.from_rpc(error)
        if typed.code == grpc.StatusCode.DEADLINE_EXCEEDED and typed.reason == "UNSPECIFIED":
            return Failure(TandemError("DEADLINE", "the deadline passed while the engine worked"))
        if typed.reason in ("ENGINE_DRAINING", "ENGINE_FULL"):
            return Failure(typed, error, retry=True, at_once=typed.reason == "ENGINE_DRAINING")
        if typed.code == grpc.StatusCode.UNAVAILABLE:
            return Failure(typed, error, retry=True, blame=True, crash=self.accepted)
        return Failure(typed, error)

    def hung(self, reason: str) -> Failure:
        """The engine was declared hung while it worked on this."""
        error = TandemError("UNSPECIFIED", reason, code=grpc.StatusCode.UNAVAILABLE)
        return Failure(error, retry=True, blame=True, crash=self.accepted)


def broken(message: str) -> Failure:
    """The engine answered against the contract."""
    return Failure(TandemError("INTERNAL", message), blame=True)
