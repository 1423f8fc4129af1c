"""What a session answers to good, stale and malformed questions."""

from __future__ import annotations

from draft_service.session import Limits, Session
from tandem.draft.v1 import draft_pb2 as pb
from tandem.lm.proposers import CombinedProposer, DraftSequence, Guess, NgramProposer, SuffixProposer

PROMPT = [1, 2, 3, 4, 1, 2, 3]


def session(limits: Limits | None = None) -> Session:
    return Session(CombinedProposer([NgramProposer((3, 2)), SuffixProposer()]), epoch=9, limits=limits)


def question(*updates: pb.SequenceUpdate, **fields: object) -> pb.ProposeRequest:
    return pb.ProposeRequest(step=1, engine_epoch=5, sequences=updates, **fields)  # type: ignore[arg-type]


def start(identity: int = 1, want: int = 2, **fields: object) -> pb.SequenceUpdate:
    return pb.SequenceUpdate(id=identity, new_ids=PROMPT, prompt_len=len(PROMPT), want=want, **fields)  # type: ignore[arg-type]


def test_answers_with_drafts_for_the_committed_length() -> None:
    answer = session().answer(question(start()))
    assert (answer.step, answer.draft_epoch) == (1, 9)
    (proposal,) = answer.proposals
    assert proposal.status == pb.PROPOSAL_STATUS_OK
    assert proposal.base_len == len(PROMPT)
    assert list(proposal.draft_ids) == [4, 1]
    assert 0 < proposal.confidence <= 1


def test_new_tokens_travel_with_the_question() -> None:
    under_test = session()
    under_test.answer(question(start(want=0)))
    update = pb.SequenceUpdate(id=1, base_len=len(PROMPT), new_ids=[4, 1], want=2)
    (proposal,) = under_test.answer(question(update)).proposals
    assert proposal.base_len == len(PROMPT) + 2
    assert list(proposal.draft_ids) == [2, 3]


def test_stale_base_resyncs_that_sequence_alone() -> None:
    under_test = session()
    under_test.answer(question(start(1), start(2)))
    bad = pb.SequenceUpdate(id=1, base_len=3, new_ids=[4], want=2)
    good = pb.SequenceUpdate(id=2, base_len=len(PROMPT), new_ids=[4], want=2)
    statuses = {p.id: p.status for p in under_test.answer(question(bad, good)).proposals}
    assert statuses == {1: pb.PROPOSAL_STATUS_RESYNC, 2: pb.PROPOSAL_STATUS_OK}
    (proposal,) = under_test.answer(question(start(1))).proposals
    assert proposal.status == pb.PROPOSAL_STATUS_OK


def test_unknown_sequence_resyncs() -> None:
    (proposal,) = session().answer(question(pb.SequenceUpdate(id=7, base_len=4, new_ids=[1]))).proposals
    assert proposal.status == pb.PROPOSAL_STATUS_RESYNC


def test_new_engine_epoch_voids_all_sequences() -> None:
    under_test = session()
    under_test.answer(question(start()))
    update = pb.SequenceUpdate(id=1, base_len=len(PROMPT), new_ids=[4], want=2)
    (proposal,) = under_test.answer(pb.ProposeRequest(step=2, engine_epoch=6, sequences=[update])).proposals
    assert proposal.status == pb.PROPOSAL_STATUS_RESYNC


def test_engine_that_believes_in_another_draft_starts_anew() -> None:
    under_test = session()
    under_test.answer(question(start(), draft_epoch=9))
    update = pb.SequenceUpdate(id=1, base_len=len(PROMPT), new_ids=[4], want=2)
    (proposal,) = under_test.answer(question(update, draft_epoch=8)).proposals
    assert proposal.status == pb.PROPOSAL_STATUS_RESYNC


def test_malformed_updates_are_bad_for_themselves_alone() -> None:
    under_test = session(Limits(max_sequences=4, max_sequence_tokens=20))
    answer = under_test.answer(
        question(
            start(1),
            start(2, want=33),
            pb.SequenceUpdate(id=3, want=1),
            pb.SequenceUpdate(id=4, new_ids=[1, 2], prompt_len=3, want=1),
            pb.SequenceUpdate(id=5, new_ids=[1] * 21, prompt_len=3, want=1),
        )
    )
    found = {p.id: (p.status, p.detail) for p in answer.proposals}
    assert found[1][0] == pb.PROPOSAL_STATUS_OK
    for identity, words in {2: "33", 3: "no new_ids", 4: "prompt_len is 3", 5: "21 tokens"}.items():
        assert found[identity][0] == pb.PROPOSAL_STATUS_BAD
        assert words in found[identity][1]
    assert len(under_test) == 1


def test_same_sequence_twice_in_one_question_is_bad() -> None:
    answer = session().answer(question(start(1), start(1)))
    assert [p.status for p in answer.proposals] == [pb.PROPOSAL_STATUS_BAD]


def test_number_of_sequences_is_bounded() -> None:
    under_test = session(Limits(max_sequences=2))
    answer = under_test.answer(question(start(1), start(2), start(3)))
    assert {p.id: p.status for p in answer.proposals}[3] == pb.PROPOSAL_STATUS_BAD
    under_test.answer(question(finished=[1]))
    (proposal,) = under_test.answer(question(start(3))).proposals
    assert proposal.status == pb.PROPOSAL_STATUS_OK


def test_finished_sequences_are_learnt_from_and_cut_off_ones_are_not() -> None:
    suffix = SuffixProposer()
    under_test = Session(suffix, epoch=1)
    under_test.answer(question(start(1), start(2)))
    under_test.answer(question(pb.SequenceUpdate(id=1, base_len=7, new_ids=[30, 31, 32, 33]), finished=[1]))
    assert suffix.stored_tokens == 0, "learning waits until the answer is out"
    under_test.tidy()
    assert suffix.stored_tokens == 4 + 7
    under_test.answer(question(pb.SequenceUpdate(id=2, base_len=7, new_ids=[40, 41, 42, 43])))
    under_test.close()
    assert suffix.stored_tokens == 4 + 7


def test_who_is_not_to_be_stored_is_not_learnt_from() -> None:
    suffix = SuffixProposer()
    under_test = Session(suffix, epoch=1)
    under_test.answer(question(start(1, no_store=True)))
    (proposal,) = under_test.answer(
        question(pb.SequenceUpdate(id=1, base_len=7, new_ids=[4, 1, 2, 3], want=2), finished=[])
    ).proposals
    assert list(proposal.draft_ids), "it still gets drafts"
    under_test.answer(question(finished=[1]))
    under_test.tidy()
    assert suffix.stored_tokens == 0 and not len(under_test)


def test_a_proposer_that_breaks_on_one_sequence_spares_the_others() -> None:
    class Fragile(NgramProposer):
        def propose(self, wants: list[tuple[DraftSequence, int]]) -> list[Guess]:
            if any(sequence.id == 2 for sequence, _ in wants):
                raise RuntimeError("planted")
            return super().propose(wants)

    under_test = Session(Fragile((3, 2)), epoch=1)
    found = {p.id: p.status for p in under_test.answer(question(start(1), start(2), start(3))).proposals}
    assert found == {1: pb.PROPOSAL_STATUS_OK, 2: pb.PROPOSAL_STATUS_BAD, 3: pb.PROPOSAL_STATUS_OK}
    assert len(under_test) == 2
