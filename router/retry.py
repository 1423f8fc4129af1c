"""What retries share: why an attempt failed, how many may retry at once, memory for resuming, refused requests."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended early, and what that allows."""

    error: TandemError
    # The engine's own status, passed on as it is when nothing is retried.
    status: grpc.aio.AioRpcError | None = None
    retry: bool = False
    at_once: bool = False
    # The engine itself is to blame (outlier detection).
    blame: bool = False
    # The engine died with this request running.
    crash: bool = False


def gave_up(last: Failure, tries: int, wait_s: float) -> TandemError:
    """What the client is told after so many attempts in a row failed. wait_s: the usual wait for a place, seconds."""
    if last.error.reason == "ENGINE_FULL":
        return TandemError("OVERLOADED", f"{tries} engines in a row were full", retry_after_s=wait_s)
    message = f"{tries} attempts in a row failed; last: {last.error.message}"
    return TandemError("NO_ENGINE", message, retry_after_s=5.0)


class CrashList:
    """Digests of requests that were running when two engines died."""

    def __init__(self, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._until: dict[bytes, float] = {}

    def add(self, request: pb.GenerateRequest) -> None:
        self._until[_digest(request)] = self._clock() + self._keep_s

    def check(self, request: pb.GenerateRequest) -> None:
        """Raises TandemError ENGINE_CRASH if this request is refused."""
        if not self._until:
            return
        now = self._clock()
        self._until = {digest: until for digest, until in self._until.items() if until > now}
        until = self._until.get(_digest(request)) if self._until else None
        if until is not None:
            raise TandemError(
                "ENGINE_CRASH",
                f"this request was running when two engines died; it is refused for another {until - now:.0f} s",
            )


def _digest(request: pb.GenerateRequest) -> bytes:
    """What makes two requests the same: not their ids, seeds, deadlines or attempts."""
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    for name in ("request_id", "timeout_ms", "resume", "attempt", "tenant", "priority"):
        copy.ClearField(name)
    copy.sampling.ClearField("seed")
    return hashlib.blake2b(copy.SerializeToString(deterministic=True), digest_size=16).digest()


class RetryBudget:
    """Paces retries: at most a share of the live requests may be retrying at once; others wait for their turn."""

    FLOOR = 4

    def __init__(self, share: float) -> None:
        self._share = share
        self._retrying = 0
        self.live = 0
        self._waiters: list[asyncio.Future[None]] = []

    def _limit(self) -> int:
        return max(self.FLOOR, int(self._share * self.live))

    async def enter(self) -> None:
        while self._retrying >= self._limit():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            try:
                await future
            finally:
                if future in self._waiters:
                    self._waiters.remove(future)
        self._retrying += 1

    def leave(self) -> None:
        self._retrying -= 1
        for future in self._waiters[: max(0, self._limit() - self._retrying)]:
            if not future.done():
                future.set_result(None)


class KeptBytes:
    """Memory for the forwarded bytes of all live requests, under one cap."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> bool:
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        self.used -= size


class Turn:
    """One request's place in the retry budget: taken before its first retry, given back with its next token."""

    def __init__(self, budget: RetryBudget, jitter_s: float) -> None:
        self._budget = budget
        self._jitter_s = jitter_s
        self._taken = False

    async def take(self, deadline: float | None) -> None:
        """Waits a little, so that not all who lost an engine come back at once, and for a place in the budget.

        Args:
            deadline: monotonic seconds.

        Raises:
            TandemError: DEADLINE.
        """
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(left):
                await asyncio.sleep(random.uniform(0, self._jitter_s))
                if not self._taken:
                    await self._budget.enter()
                    self._taken = True
        except TimeoutError:
            raise TandemError("DEADLINE", "the deadline passed before the request could be retried") from None

    def leave(self) -> None:
        """Gives the place back, if there is one."""
        if self._taken:
            self._taken = False
            self._budget.leave()
