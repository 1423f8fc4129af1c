"""One client's Generate call over all its attempts: bytes in, bytes out, and one undisturbed stream for the client."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import cast

import grpc

from router import tracing
from router.admission import Grant, Job
from router.attempt import Attempt, AttemptStream, broken
from router.forwarded import Forwarded
from router.outbox import Sink
from router.policies import Query
from router.recorder import Decision
from router.retry import Failure, Turn, gave_up
from router.shared import Shared
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.resume import BrokenStreamError, build_resume
from tandem.tracing import NULL_SPAN, Span, names

log = logging.getLogger("router.request")

# How much longer than the deadline the router waits for the engine's own, better error.
DEADLINE_SLACK_S = 0.5


class Generation:
    """A Generate call. `run` writes the whole answer to the outbox or raises what the client should see."""

    def __init__(
        self,
        shared: Shared,
        raw: bytes,
        request: pb.GenerateRequest,
        query: Query,
        job: Job,
        outbox: Sink,
        span: Span = NULL_SPAN,
    ) -> None:
        self._shared = shared
        self._raw = raw
        self._request = request
        self._query = query
        self._job = job
        self._outbox = outbox
        self._span = span
        self._forwarded = Forwarded(shared.kept, shared.metrics)
        self._crashed: list[str] = []
        self._accepted: pb.Accepted | None = None
        self._prompt_sent = False
        self._turn = Turn(shared.budget, shared.settings.retry_jitter_ms / 1000)
        self._stalled_retries = 0
        self._attempt = max(1, request.attempt)
        self._queued_s = 0.0
        self._ttft_s: float | None = None
        self._engine = ""
        self._decision: Decision | None = None
        # Of the attempt that runs.
        self._grant: Grant | None = None
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
            self._turn.leave()
            self._shared.budget.live -= 1
            self._forwarded.forget()
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
        self._grant = grant
        stream = AttemptStream(self)
        try:
            while (chunk := await call.read()) is not grpc.aio.EOF:
                await self._forward(stream.filter(cast(bytes, chunk)))
            return None if stream.finished_well() else broken("the engine ended the stream without a usage event")
        except grpc.aio.AioRpcError as error:
            return stream.failed(error)
        except BrokenStreamError as error:
            return broken(f"the engine sent a broken stream: {error}")
        except asyncio.CancelledError:
            if attempt.hung:
                return stream.hung(attempt.hung)
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
        self._forwarded.add(data)
        if self._outbox.put(data):
            await self._outbox.room()

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
            raise gave_up(failure, self._stalled_retries, self._shared.admission.wait_estimate_s())
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
            await self._turn.take(self._job.deadline)
        return True

    def _prepare(self, failure: Failure) -> bool:
        if self._accepted is not None and not self._forwarded.complete:
            raise TandemError(
                "INTERNAL", "the engine was lost, and the router's memory for resuming was used up by other streams"
            )
        try:
            again = build_resume(self._request, self._forwarded.chunks)
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

    # -- what the stream tells

    def on_accepted(self, accepted: pb.Accepted) -> bool:
        """Notes it; returns whether the client should see it."""
        first, grant = self._accepted is None, self._grant
        assert grant is not None
        grant.engine.load.accepted(accepted.prompt_tokens)
        if self._decision is not None:
            self._decision.accepted(accepted.cached_tokens)
        if first:
            self._accepted = accepted
            predicted = grant.candidate.matched_blocks * grant.candidate.engine.block_size
            self._shared.metrics.prediction(accepted.prompt_tokens, predicted, accepted.cached_tokens)
            return True
        # A resumed stream under other numerics says so.
        return accepted.numerics_id != self._job.numerics_id

    def on_first_token(self, cached_tokens: int, sent_at: float) -> None:
        grant = self._grant
        assert grant is not None
        grant.engine.load.prefilled(grant.sent)
        self._turn.leave()
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

    def on_prompt(self) -> bool:
        first, self._prompt_sent = not self._prompt_sent, True
        return first

    def _report(self) -> None:
        usage = self._forwarded.usage()
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
