"""The draft's own spans, and that tracing changes no answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from draft_service.service import DraftServicer
from draft_service.session import Limits, Session
from draft_service.settings import DraftSettings
from draft_service.tracing import TracedSession
from tandem.draft.v1 import draft_pb2 as pb
from tandem.lm.proposers import NgramProposer
from tandem.tracing import NULL_TRACER, Tracer, open_tracer
from tests.tandem.tracing.receiver import Receiver, grpc_receiver

TRACE = "0af7651916cd43dd8448eb211c80319c"
LOOP = [1, 2, 3, 4] * 4


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with grpc_receiver() as made:
        yield made


@pytest.fixture
def tracer(receiver: Receiver) -> Tracer:
    return open_tracer(DraftSettings(otlp_endpoint=receiver.endpoint), "draft", {})


def question(step: int, *updates: pb.SequenceUpdate, finished: tuple[int, ...] = ()) -> pb.ProposeRequest:
    return pb.ProposeRequest(step=step, engine_epoch=5, sequences=updates, finished=finished)


def start(identity: int, traced: bool = True, want: int = 4) -> pb.SequenceUpdate:
    parent = f"00-{TRACE}-{identity:016x}-01" if traced else ""
    return pb.SequenceUpdate(id=identity, new_ids=LOOP, prompt_len=8, want=want, traceparent=parent)


def more(identity: int, base: int, *ids: int) -> pb.SequenceUpdate:
    return pb.SequenceUpdate(id=identity, base_len=base, new_ids=ids, want=4)


QUESTIONS = [
    question(1, start(1), start(2, traced=False)),
    question(2, more(1, 16, 1), more(2, 16, 1)),
    question(3, more(1, 99), start(3, want=0)),
    question(4, finished=(2, 3)),
]


def answers(session: Session) -> list[pb.ProposeResponse]:
    found = []
    for asked in QUESTIONS:
        response = session.answer(asked)
        session.tidy()
        response.elapsed_us = 0
        found.append(response)
    return found


def test_one_span_per_traced_sequence_with_its_counts(receiver: Receiver, tracer: Tracer) -> None:
    session = TracedSession(NgramProposer((3, 2)), 9, Limits(), tracer)
    proposed = sum(
        len(proposal.draft_ids) for answer in answers(session) for proposal in answer.proposals if proposal.id == 1
    )
    session.close()
    tracer.close()
    assert proposed
    spans = {int(span.parent_id, 16): span for span in receiver.spans}
    # The second is of a request that nobody traces.
    assert set(spans) == {1, 3}
    assert {span.name for span in spans.values()} == {"propose"}
    assert {(span.trace_id, span.service, span.kind) for span in spans.values()} == {(TRACE, "tandem-draft", "SERVER")}
    lost, finished = spans[1].attributes, spans[3].attributes
    assert lost["tandem.draft.proposed_tokens"] == lost["tandem.draft.proposed_tokens.ngram"] == proposed
    assert lost["tandem.draft.questions"] == 3 and lost["tandem.outcome"] == "resync"
    assert finished["tandem.draft.questions"] == 0 and finished["tandem.outcome"] == "finished"


def test_tracing_changes_no_answer(tracer: Tracer) -> None:
    plain = answers(Session(NgramProposer((3, 2)), 9))
    assert plain == answers(TracedSession(NgramProposer((3, 2)), 9, Limits(), tracer))
    assert any(answer.proposals for answer in plain)
    tracer.close()


def test_a_stream_that_breaks_ends_its_spans(receiver: Receiver, tracer: Tracer) -> None:
    session = TracedSession(NgramProposer((3, 2)), 9, Limits(), tracer)
    session.answer(question(1, start(1)))
    session.close()
    tracer.close()
    assert receiver.one("propose").attributes["tandem.outcome"] == "disconnected"


def test_without_tracing_the_session_is_the_plain_one(tracer: Tracer) -> None:
    for given, kind in ((NULL_TRACER, Session), (tracer, TracedSession)):
        servicer = DraftServicer(NgramProposer((3, 2)), ("ngram",), 9, Limits(), tracer=given)
        assert type(servicer._session()) is kind
    tracer.close()
