"""The router's span of a request: which engines were tried, why, and how it went on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.recorder import Decision
from tandem.inference.v1 import inference_pb2 as pb
from tandem.tracing import Span, Value, grpc_status, names

if TYPE_CHECKING:
    from router.admission import Grant

# Shorter waits for an engine are no wait.
_WAIT_S = 0.001


def request(span: Span, method: str, message: pb.GenerateRequest | pb.EmbedRequest) -> None:
    """What is asked for."""
    grpc_status.call(span, method)
    found: dict[str, Value] = {names.REQUEST_ID: message.request_id}
    if message.model:
        found[names.REQUEST_MODEL] = message.model
    span.set(found)


def attempt(span: Span, decision: Decision, grant: Grant, began: float, waited: float) -> None:
    """An engine was chosen. began: when the wait for it did (time.monotonic); waited: seconds."""
    if waited >= _WAIT_S:
        span.child("queue", began).end(began + waited)
    span.event(
        "attempt",
        {
            names.ATTEMPT: decision.attempt,
            names.ENGINE: grant.engine.address,
            "tandem.route.policy": decision.policy,
            names.REASON: decision.reason,
            "tandem.route.matched_blocks": grant.candidate.matched_blocks,
            "tandem.route.predicted_ms": round(grant.candidate.predicted_s * 1000, 3),
            "tandem.route.candidates": len(grant.candidates),
        },
    )


def finished(
    span: Span, outcome: str, engine: str, attempts: int, queued_s: float, ttft_s: float | None, usage: pb.Usage
) -> None:
    """How it ended; the engine is the last one that was tried."""
    found: dict[str, Value] = {
        names.OUTCOME: outcome,
        names.ENGINE: engine,
        names.ATTEMPTS: attempts,
        names.QUEUED_MS: round(queued_s * 1000, 3),
        names.INPUT_TOKENS: usage.prompt_tokens,
        names.OUTPUT_TOKENS: usage.completion_tokens,
        names.CACHED_TOKENS: usage.cached_tokens,
    }
    if ttft_s is not None:
        found[names.TTFT_MS] = round(ttft_s * 1000, 3)
    span.set(found)
