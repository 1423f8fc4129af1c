"""The draft's own span of a sequence: one for all its questions. Used only where traces are on.

It ends with the last answer, but goes out when the engine says that the sequence is gone, which it does with its next
question, or when the stream ends.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from draft_service.session import Limits, Session
from tandem.draft.v1 import draft_pb2 as pb
from tandem.lm.proposers import Proposer
from tandem.tracing import Span, Tracer, grpc_status, names

_METHOD = "tandem.draft.v1.DraftService/Propose"


@dataclass(slots=True)
class _Traced:
    span: Span
    # Of the last answer, time.monotonic().
    last: float
    questions: int = 0
    proposed: Counter[str] = field(default_factory=Counter)

    def end(self, outcome: str) -> None:
        self.span.set(
            {
                "tandem.draft.questions": self.questions,
                names.DRAFTS_PROPOSED: sum(self.proposed.values()),
                names.OUTCOME: outcome,
            }
        )
        self.span.set({f"{names.DRAFTS_PROPOSED}.{name}": count for name, count in sorted(self.proposed.items())})
        self.span.end(self.last)


class TracedSession(Session):
    """A session that makes a span of each sequence whose request is traced. The answers are the same, and as soon."""

    def __init__(self, proposer: Proposer, epoch: int, limits: Limits | None, tracer: Tracer) -> None:
        super().__init__(proposer, epoch, limits)
        self._tracer = tracer
        self._traced: dict[int, _Traced] = {}
        self._unseen: list[tuple[float, pb.ProposeRequest, pb.ProposeResponse]] = []

    def answer(self, question: pb.ProposeRequest) -> pb.ProposeResponse:
        began = time.monotonic()
        response = super().answer(question)
        self._unseen.append((began, question, response))
        return response

    def tidy(self) -> None:
        unseen, self._unseen = self._unseen, []
        for began, question, response in unseen:
            self._look(began, question, response)
        super().tidy()

    def close(self) -> None:
        super().close()
        for traced in self._traced.values():
            traced.end("disconnected")
        self._traced.clear()

    def _begin(self, traceparent: str, began: float) -> _Traced:
        span = self._tracer.serve("propose", lambda: (("traceparent", traceparent),), began)
        grpc_status.call(span, _METHOD)
        return _Traced(span, began)

    def _look(self, began: float, question: pb.ProposeRequest, response: pb.ProposeResponse) -> None:
        for update in question.sequences:
            if update.traceparent and update.id not in self._traced:
                self._traced[update.id] = self._begin(update.traceparent, began)
            traced = self._traced.get(update.id)
            if traced is not None:
                traced.questions += update.want > 0
                traced.last = began + response.elapsed_us / 1e6
        outcomes: dict[int, str] = dict.fromkeys(question.finished, "finished")
        for proposal in response.proposals:
            traced = self._traced.get(proposal.id)
            if traced is None:
                continue
            if proposal.status == pb.PROPOSAL_STATUS_OK:
                traced.proposed[proposal.proposer] += len(proposal.draft_ids)
            else:
                outcomes[proposal.id] = "resync" if proposal.status == pb.PROPOSAL_STATUS_RESYNC else "refused"
        for identity, outcome in outcomes.items():
            ended = self._traced.pop(identity, None)
            if ended is not None:
                ended.end(outcome)
