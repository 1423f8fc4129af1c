"""The engine's spans of a request: generate; below it queue, prefill, decode, and draft where drafts are sought.

All but the first and draft are made when the request is over, from the times that its receipt is made of: the step loop
knows nothing of traces.
"""

from __future__ import annotations

import time

from engine_service.output import Identity, Stream
from engine_service.speculation import NullSpeculation, SpeculationController
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.tracing import NULL_SPAN, Span, Value, grpc_status, names

_SERVICE = "tandem.inference.v1.InferenceService"


class TracedRequest:
    """One Generate call that is recorded."""

    def __init__(self, span: Span, message: pb.GenerateRequest, arrival: float) -> None:
        """arrival: time.monotonic() of the call."""
        self._span = span
        self._arrival = arrival
        self._draft = NULL_SPAN
        grpc_status.call(span, f"{_SERVICE}/Generate")
        found: dict[str, Value] = {names.REQUEST_ID: message.request_id, names.ATTEMPT: max(1, message.attempt)}
        if message.model:
            found[names.REQUEST_MODEL] = message.model
        span.set(found)

    def draft(self, speculation: SpeculationController) -> str:
        """Starts the draft's span if drafts will be sought; its traceparent, which the draft service is told."""
        if isinstance(speculation, NullSpeculation):
            return ""
        self._draft = self._span.child("draft", self._arrival, calls=True)
        return dict(self._draft.headers).get("traceparent", "")

    def refused(self, error: TandemError | None) -> None:
        """The engine did not take it; None: the caller hung up before it could."""
        if error is None:
            grpc_status.cancelled(self._span)
        else:
            grpc_status.failed(self._span, error)
        self._draft.end()
        self._span.end()

    def finished(self, stream: Stream, identity: Identity, outcome: str) -> None:
        """Everything is over, well or not."""
        request, now = stream.request, time.monotonic()
        self._part("queue", request.arrival, request.first_step, now)
        if request.first_step is not None:
            prefill = self._span.child("prefill", request.first_step)
            prefill.set({names.INPUT_TOKENS: len(request.prompt), names.CACHED_TOKENS: request.cached_tokens})
            prefill.end(request.first_token or now)
        if request.first_token is not None:
            decode = self._span.child("decode", request.first_token)
            decode.set({names.OUTPUT_TOKENS: stream.completion_tokens, "tandem.steps": request.steps})
            decode.end(request.last_token or now)
        self._end_draft(stream, now)
        self._describe(stream, identity, outcome)
        if stream.outbox.error is not None:
            grpc_status.failed(self._span, stream.outbox.error)
        elif outcome == "cancelled":
            grpc_status.cancelled(self._span)
        else:
            grpc_status.done(self._span)
        self._span.end(now)

    def _part(self, name: str, start: float, end: float | None, now: float) -> None:
        self._span.child(name, start).end(now if end is None else end)

    def _end_draft(self, stream: Stream, now: float) -> None:
        request = stream.request
        if not self._draft.recording:
            return
        self._draft.set(
            {names.DRAFTS_PROPOSED: request.drafts_proposed, names.DRAFTS_ACCEPTED: request.drafts_accepted}
        )
        self._draft.set(
            {f"{names.DRAFTS_ACCEPTED}.{name}": count for name, count in sorted(request.accepted_by_proposer.items())}
        )
        self._draft.end(request.last_token or now)

    def _describe(self, stream: Stream, identity: Identity, outcome: str) -> None:
        request = stream.request
        self._span.set(
            {
                names.OUTCOME: outcome,
                names.ENGINE: identity.engine,
                names.RESPONSE_MODEL: identity.model,
                names.INPUT_TOKENS: len(request.prompt),
                names.OUTPUT_TOKENS: stream.completion_tokens,
                names.CACHED_TOKENS: request.cached_tokens,
                names.FINISH_REASONS: stream.finish_reasons,
                names.DRAFTS_PROPOSED: request.drafts_proposed,
                names.DRAFTS_ACCEPTED: request.drafts_accepted,
                "tandem.preemptions": request.preemptions,
                "tandem.numerics_id": identity.numerics_id,
                "tandem.kernel_path": identity.kernel_path,
            }
        )


def embedded(span: Span, message: pb.EmbedRequest) -> None:
    """Ends the span of an Embed call."""
    if span.recording:
        grpc_status.call(span, f"{_SERVICE}/Embed")
        span.set({names.REQUEST_ID: message.request_id, "tandem.inputs": len(message.inputs)})
    span.end()
