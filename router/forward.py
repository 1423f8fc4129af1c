"""One client's Generate call over all its attempts: bytes in, bytes out, and one undisturbed stream for the client."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import cast

import grpc

from router import tracing
from router.admission import Admission, Grant, Job
from router.engine import Attempt
from router.live import LiveConfig
from router.metrics import RouterMetrics
from router.outbox import Outbox
from router.policies import Query
from router.recorder import Decision, Recorder
from router.retry import CrashList, Failure, KeptBytes, RetryBudget
from router.settings import RouterSettings
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.resume import BrokenStreamError, build_resume, split_events
from tandem.tracing import NULL_SPAN, Span, names

log = logging.getLogger("router.request")

# How much longer than the deadline the router waits for the engine's own, better error.
DEADLINE_SLACK_S = 0.5


@dataclass(frozen=True)
class Shared:
    """What all requests of a router share."""

    settings: RouterSettings
    live: LiveConfig
    admission: Admission
    budget: RetryBudget
    kept: KeptBytes
    crashes: CrashList
    recorder: Recorder
    metrics: RouterMetrics


class Generation:
    """A Generate call. `run` writes the whole answer to the outbox or raises what the client should see."""

    def __init__(
        self,
        shared: Shared,
        raw: bytes,
        request: pb.GenerateRequest,
        query: Query,
        job: Job,
        outbox: Outbox,
        span: Span = NULL_SPAN,
    ) -> None:
        self._shared = shared
        self._raw = raw
        self._request = request
        self._query = query
        self._job = job
        self._outbox = outbox
        self._span = span
        self._forwarded: list[bytes] = []
        self._kept_size = 0
        self._resumable = True
        self._crashed: list[str] = []
        self._accepted: pb.Accepted | None = None
        self._prompt_sent = False
        self._in_budget = False
        self._stalled_retries = 0
        self._attempt = max(1, request.attempt)
        self._queued_s = 0.0
        self._ttft_s: float | None = None
        self._tail = b""
        self._engine = ""
        self._decision: Decision | None = None
        self.outcome = "error"

    async def run(self) -> None:
        """Runs attempts until the stream is complete.

        Raises:
            TandemError: for the client.
            grpc.aio.AioRpcError: an engine's own answer, for the client as it is.
        """
        self._shared.budget.live += 1
        try:
            while True:
                failure = await self._place_and_try()
                if failure is None:
                    self.outcome = "ok" if self._attempt == max(1, self._request.attempt) else "resumed"
                    return
                if not await self._next_attempt(failure):
                    self.outcome = "ok"
                    return
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise
        except TandemError as error:
            self.outcome = "deadline" if error.reason == "DEADLINE" else "error"
            raise
        finally:
            self._leave_budget()
            self._shared.budget.live -= 1
            self._shared.kept.give(self._kept_size)
            self._shared.admission.finish(self._job)
            self._report()

    # -- one attempt

    async def _place_and_try(self) -> Failure | None:
        began = time.monotonic()
        grant = await self._shared.admission.acquire(self._job)
        waited = time.monotonic() - began
        self._queued_s += waited
        self._shared.metrics.queue.observe(waited)
        self._decision = self._shared.recorder.decided(self._query, grant, self._attempt, self._queued_s)
        self._engine = grant.engine.address
        if self._span.recording:
            tracing.attempt(self._span, self._decision, grant, began, waited)
        failure: Failure | None = None
        try:
            failure = await self._try(grant)
        finally:
            self._shared.admission.release(grant, self._job, final=False)
            if failure is None:
                grant.engine.ended()
        self._judge(grant, failure)
        return failure

    def _judge(self, grant: Grant, failure: Failure | None) -> None:
        engine = grant.engine
        if failure is None:
            engine.succeeded()
        elif failure.blame:
            engine.failed(failure.error.message)
        else:
            engine.ended()
        if failure is not None:
            self._shared.metrics.failures.labels(failure.error.reason).inc()
            if failure.error.reason == "ENGINE_DRAINING":
                engine.draining_here = True
            elif failure.error.reason == "ENGINE_FULL":
                engine.load.full = True

    async def _try(self, grant: Grant) -> Failure | None:
        left = self._time_left()
        attempt = Attempt()
        call = grant.engine.generate(
            self._payload(left),
            timeout=None if left is None else left + DEADLINE_SLACK_S,
            metadata=(*grant.engine.metadata(self._request.request_id), *self._span.headers),
        )
        attempt.call = call
        grant.engine.attempts.add(attempt)
        stream = _AttemptStream(self, grant)
        try:
            while (chunk := await call.read()) is not grpc.aio.EOF:
                await self._forward(stream.filter(cast(bytes, chunk)))
            return None if stream.finished_well() else _broken("the engine ended the stream without a usage event")
        except grpc.aio.AioRpcError as error:
            return self._failure(error, stream)
        except BrokenStreamError as error:
            return _broken(f"the engine sent a broken stream: {error}")
        except asyncio.CancelledError:
            if attempt.hung:
                return Failure(
                    TandemError("UNSPECIFIED", attempt.hung, code=grpc.StatusCode.UNAVAILABLE),
                    retry=True,
                    blame=True,
                    crash=stream.accepted,
                )
            raise
        finally:
            grant.engine.attempts.discard(attempt)
            call.cancel()

    def _time_left(self) -> float | None:
        if self._job.deadline is None:
            return None
        left = self._job.deadline - time.monotonic()
        if left <= 0:
            raise TandemError("DEADLINE", "the deadline passed")
        return left

    def _payload(self, left: float | None) -> bytes:
        """The request's bytes, with what the router adds appended: merged fields win over earlier ones."""
        extra = pb.GenerateRequest(attempt=self._attempt)
        if left is not None:
            extra.timeout_ms = max(1, int(left * 1000))
        return self._raw + extra.SerializeToString()

    async def _forward(self, data: bytes) -> None:
        if not data:
            return
        if self._resumable:
            if self._shared.kept.take(len(data)):
                self._kept_size += len(data)
                self._forwarded.append(data)
            else:
                self._forget()
        self._tail = data
        if self._outbox.put(data):
            await self._outbox.room()

    def _forget(self) -> None:
        """The memory cap is reached: this stream can no longer be resumed."""
        self._resumable = False
        self._forwarded.clear()
        self._shared.kept.give(self._kept_size)
        self._kept_size = 0
        self._shared.metrics.unresumable.inc()

    def _failure(self, error: grpc.aio.AioRpcError, stream: _AttemptStream) -> Failure:
        typed = TandemError.from_rpc(error)
        if typed.code == grpc.StatusCode.DEADLINE_EXCEEDED and typed.reason == "UNSPECIFIED":
            return Failure(TandemError("DEADLINE", "the deadline passed while the engine worked"))
        if typed.reason in ("ENGINE_DRAINING", "ENGINE_FULL"):
            return Failure(typed, error, retry=True, at_once=typed.reason == "ENGINE_DRAINING")
        if typed.code == grpc.StatusCode.UNAVAILABLE:
            return Failure(typed, error, retry=True, blame=True, crash=stream.accepted)
        return Failure(typed, error)

    # -- between attempts

    async def _next_attempt(self, failure: Failure) -> bool:
        """Prepares the next attempt; False if the stream was complete anyway. Raises if there is none."""
        if not failure.retry:
            raise failure.status or failure.error
        if failure.crash:
            self._crashed.append(self._engine)
            if len(self._crashed) >= 2:
                self._shared.crashes.add(self._request)
                raise TandemError(
                    "ENGINE_CRASH", f"two engines died while they ran this request; last: {failure.error.message}"
                )
        self._stalled_retries += 1
        if self._stalled_retries > self._shared.live.max_retries:
            raise self._gave_up(failure)
        if not self._prepare(failure):
            return False
        kind = "resume" if self._accepted else "retry"
        self._shared.metrics.retries.labels(kind).inc()
        self._span.event(kind, {"tandem.lost": self._engine, names.REASON: failure.error.reason})
        log.info(
            "request goes on elsewhere",
            extra={
                "request_id": self._request.request_id,
                "lost": self._engine,
                "reason": failure.error.message,
                "attempt": self._attempt,
            },
        )
        if not failure.at_once:
            await self._pace()
        return True

    def _gave_up(self, failure: Failure) -> TandemError:
        tries = self._stalled_retries
        if failure.error.reason == "ENGINE_FULL":
            return TandemError(
                "OVERLOADED",
                f"{tries} engines in a row were full",
                retry_after_s=self._shared.admission.wait_estimate_s(),
            )
        return TandemError(
            "NO_ENGINE", f"{tries} attempts in a row failed; last: {failure.error.message}", retry_after_s=5.0
        )

    def _prepare(self, failure: Failure) -> bool:
        if self._accepted is not None and not self._resumable:
            raise TandemError(
                "INTERNAL", "the engine was lost, and the router's memory for resuming was used up by other streams"
            )
        try:
            again = build_resume(self._request, self._forwarded)
        except BrokenStreamError as error:
            raise TandemError("INTERNAL", f"the stream cannot be resumed: {error}") from error
        if again is None:
            return False
        self._attempt += 1
        again.ClearField("timeout_ms")
        self._raw = again.SerializeToString()
        self._job.avoid = self._job.avoid | {self._engine}
        self._job.again = True
        if self._accepted is not None:
            self._job.numerics_id = self._accepted.numerics_id
        return True

    async def _pace(self) -> None:
        jitter = random.uniform(0, self._shared.settings.retry_jitter_ms / 1000)
        left = None if self._job.deadline is None else max(0.0, self._job.deadline - time.monotonic())
        try:
            async with asyncio.timeout(left):
                await asyncio.sleep(jitter)
                if not self._in_budget:
                    await self._shared.budget.enter()
                    self._in_budget = True
        except TimeoutError:
            raise TandemError("DEADLINE", "the deadline passed before the request could be retried") from None

    def _leave_budget(self) -> None:
        if self._in_budget:
            self._in_budget = False
            self._shared.budget.leave()

    # -- what the stream tells

    def on_accepted(self, accepted: pb.Accepted, grant: Grant) -> bool:
        """Notes it; returns whether the client should see it."""
        first = self._accepted is None
        if self._decision is not None:
            self._decision.accepted(accepted.cached_tokens)
        if first:
            self._accepted = accepted
            predicted = grant.candidate.matched_blocks * grant.candidate.engine.block_size
            self._shared.metrics.prediction(accepted.prompt_tokens, predicted, accepted.cached_tokens)
            return True
        # A resumed stream under other numerics says so.
        return accepted.numerics_id != self._job.numerics_id

    def on_first_token(self, grant: Grant, cached_tokens: int, sent_at: float) -> None:
        grant.engine.load.prefilled(grant.sent)
        self._leave_budget()
        self._stalled_retries = 0
        now = time.monotonic()
        policy = self._shared.admission.policy
        policy.answered(self._query, grant.candidate, cached_tokens, now - sent_at)
        if self._ttft_s is None:
            self._outbox.no_pause()
            self._ttft_s = now - self._job.arrival
            self._shared.metrics.ttft.observe(self._ttft_s)
        if self._decision is not None:
            self._decision.first_token(self._ttft_s)

    def take_prompt(self) -> bool:
        """Whether prompt scores should pass; once."""
        first, self._prompt_sent = not self._prompt_sent, True
        return first

    def _usage(self) -> pb.Usage | None:
        try:
            for kind, start, end in reversed(split_events(self._tail)):
                if kind == "usage":
                    return pb.GenerateResponse.FromString(self._tail[start:end]).events[0].usage
        except BrokenStreamError:
            pass
        return None

    def _report(self) -> None:
        usage = self._usage() or pb.Usage()
        if self._decision is not None:
            self._shared.recorder.finished(self._decision, self.outcome, usage.completion_tokens)
        self._shared.metrics.requests.labels(self.outcome).inc()
        if self._span.recording:
            tracing.finished(self._span, self.outcome, self._engine, self._attempt, self._queued_s, self._ttft_s, usage)
        log.info(
            "request",
            extra={
                "request_id": self._request.request_id,
                "model": self._job.model,
                "engine": self._engine,
                "outcome": self.outcome,
                "attempts": self._attempt,
                "prompt_tokens": self._query.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "cached_tokens": usage.cached_tokens,
                "queued_ms": round(self._queued_s * 1000, 1),
                "ttft_ms": None if self._ttft_s is None else round(self._ttft_s * 1000, 1),
                "total_ms": round((time.monotonic() - self._job.arrival) * 1000, 1),
            },
        )


class _AttemptStream:
    """Looks at an attempt's answer only until its first token; from then on bytes pass unread."""

    def __init__(self, generation: Generation, grant: Grant) -> None:
        self._generation = generation
        self._grant = grant
        self._sent_at = time.monotonic()
        self._started = False
        self._cached_tokens = 0
        self._last = b""
        self.accepted = False

    def filter(self, chunk: bytes) -> bytes:
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
                if not self._generation.on_accepted(accepted, self._grant):
                    continue
            elif kind == "prompt":
                if not self._generation.take_prompt():
                    continue
            elif not self._started:
                self._started = True
                self._generation.on_first_token(self._grant, self._cached_tokens, self._sent_at)
            kept.append(part)
        return b"".join(kept)

    def finished_well(self) -> bool:
        """Whether the last message held the usage event, which ends every complete stream."""
        return any(kind == "usage" for kind, _, _ in split_events(self._last))


def _broken(message: str) -> Failure:
    return Failure(TandemError("INTERNAL", message), blame=True)
