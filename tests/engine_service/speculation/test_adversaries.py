"""Draft servers that err in every way: the output never changes, nothing raises, nothing hangs."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest

from engine_service.speculation import Draft, NullSpeculation, SpecCandidate
from engine_service.speculation.client import DraftClient
from engine_service.speculation.controller import DraftSpeculation, SpeculationOptions, connect
from tandem.draft.v1 import draft_pb2 as pb
from tandem.lm.types import SamplingParams, Sequence
from tests.engine_service.speculation.fakes import (
    VOCAB,
    DraftServer,
    FakeLoop,
    ScriptedDraft,
    always_right,
    always_wrong,
    answer_with,
    looping,
    mixing,
    solo,
    wait_until,
)

PROMPT = [1, 2, 3]
Script = Callable[[pb.ProposeRequest, dict[int, list[int]]], Iterator[pb.ProposeResponse]]


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="td") as name:
        yield Path(name) / "d.sock"


class Bench:
    """A controller, connected to a scripted server, and a loop."""

    def __init__(self, path: Path, script: Script, **options: object) -> None:
        self.draft = ScriptedDraft(script)
        self.server = DraftServer(path, self.draft)
        fields = {"timeout_ms": 200.0, "vocab_size": VOCAB, **options}
        known = SpeculationOptions(**fields)  # type: ignore[arg-type]
        self.client = DraftClient(self.server.address, stall_s=known.stall_s, max_backoff_s=0.2)
        self.controller = DraftSpeculation(self.client, known)
        wait_until(lambda: self.client.connected)

    def loop(self, target: Callable[[list[int]], int] = mixing, **fields: object) -> FakeLoop:
        fields = fields if fields.get("pause_s") else {"ready": self.answered, **fields}
        return FakeLoop(self.controller, target, **fields)  # type: ignore[arg-type]

    def answered(self) -> bool:
        """No question is under way."""
        return not self.client._pending_step

    def close(self) -> None:
        self.controller.close()
        self.server.stop()


@pytest.fixture
def bench(path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(script: Script, **options: object) -> Bench:
        made.append(Bench(path, script, **options))
        return made[-1]

    yield make
    for entry in made:
        entry.close()
        assert entry.controller.stats.errors == 0


def check(loop: FakeLoop, count: int = 150) -> Sequence:
    sequence = loop.add(PROMPT, count)
    loop.run()
    assert sequence.token_ids[3:] == solo(loop.target, PROMPT, count)
    return sequence


def noisy(seed: int, right: float) -> Callable[[list[int], int], list[int]]:
    rng = random.Random(seed)

    def guess(tokens: list[int], want: int) -> list[int]:
        truth = solo(mixing, tokens, want)
        return [t if rng.random() < right else rng.randrange(VOCAB) for t in truth][: rng.randrange(1, want + 1)]

    return guess


def edited(edit: Callable[[pb.ProposeResponse], None]) -> Script:
    """Right answers, edited before they leave."""
    script = answer_with(always_right(mixing))

    def run(question: pb.ProposeRequest, tokens: dict[int, list[int]]) -> Iterator[pb.ProposeResponse]:
        for response in script(question, tokens):
            edit(response)
            yield response

    return run


def test_always_right_needs_few_steps_and_fewer_messages(bench: Callable[..., Bench]) -> None:
    under_test = bench(answer_with(always_right(mixing)))
    loop = under_test.loop()
    check(loop, 200)
    assert loop.steps < 40
    # Answers of 32 tokens serve several steps.
    assert under_test.draft.questions <= 200 / 32 + 3
    assert under_test.controller.stats.accepted > 150


def test_always_wrong_costs_almost_nothing(bench: Callable[..., Bench]) -> None:
    under_test = bench(answer_with(always_wrong(mixing)))
    loop = under_test.loop()
    check(loop, 1500)
    assert under_test.controller.stats.accepted == 0
    assert loop.fake_ms < 1.03 * 1500 * loop.cost(1)
    assert under_test.draft.questions < 80


@pytest.mark.parametrize("right", [0.2, 0.6, 0.9])
def test_random_drafts(bench: Callable[..., Bench], right: float) -> None:
    check(bench(answer_with(noisy(7, right))).loop(), 300)


def test_truncated_and_empty_answers(bench: Callable[..., Bench]) -> None:
    def cut(response: pb.ProposeResponse) -> None:
        for proposal in response.proposals:
            del proposal.draft_ids[1:]
        if response.step % 3 == 0:
            del response.proposals[:]

    check(bench(edited(cut)).loop())


MALFORMED: dict[str, Callable[[pb.Proposal], None]] = {
    "no ids": lambda p: p.ClearField("draft_ids"),
    "too many ids": lambda p: p.draft_ids.extend([1] * 32),
    "ids beyond the vocabulary": lambda p: p.draft_ids.__setitem__(0, VOCAB),
    "huge ids": lambda p: p.draft_ids.__setitem__(0, 2**32 - 1),
    "base ahead": lambda p: setattr(p, "base_len", p.base_len + 1),
    "base behind": lambda p: setattr(p, "base_len", p.base_len - 1),
    "base zero": lambda p: setattr(p, "base_len", 0),
    "unknown sequence": lambda p: setattr(p, "id", 999),
    "unknown status": lambda p: setattr(p, "status", 0),
    "bad": lambda p: setattr(p, "status", pb.PROPOSAL_STATUS_BAD),
    "always resync": lambda p: setattr(p, "status", pb.PROPOSAL_STATUS_RESYNC),
    "confidence not a number": lambda p: setattr(p, "confidence", float("nan")),
    "confidence of seven": lambda p: setattr(p, "confidence", 7.0),
    "one distribution too few": lambda p: p.distributions.add(ids=[1], probabilities=[1.0]),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_proposals(bench: Callable[..., Bench], kind: str) -> None:
    def spoil(response: pb.ProposeResponse) -> None:
        for proposal in response.proposals:
            MALFORMED[kind](proposal)

    under_test = bench(edited(spoil))
    check(under_test.loop(), 80)
    assert under_test.draft.questions < 60


def test_resync_of_one_sequence_sends_it_anew_and_spares_the_other(bench: Callable[..., Bench]) -> None:
    done: list[int] = []

    def lose_first(response: pb.ProposeResponse) -> None:
        for proposal in response.proposals:
            if proposal.id == 1 and not done:
                done.append(1)
                proposal.status = pb.PROPOSAL_STATUS_RESYNC
                under_test.draft.tokens.pop(1)

    under_test = bench(edited(lose_first))
    loop = under_test.loop()
    first, second = loop.add(PROMPT, 100), loop.add([4, 5, 6], 100)
    loop.run()
    assert first.token_ids[3:] == solo(mixing, PROMPT, 100)
    assert second.token_ids[3:] == solo(mixing, [4, 5, 6], 100)
    assert under_test.controller.stats.resyncs == 1
    assert under_test.controller.stats.accepted > 100


def test_late_answers_do_not_delay_steps_and_are_used_if_they_still_match(bench: Callable[..., Bench]) -> None:
    inner = answer_with(always_right(mixing))

    def late(question: pb.ProposeRequest, tokens: dict[int, list[int]]) -> Iterator[pb.ProposeResponse]:
        time.sleep(0.03)
        yield from inner(question, tokens)

    under_test = bench(late, timeout_ms=1.0)
    loop = under_test.loop(pause_s=0.002)
    check(loop, 300)
    assert under_test.client.stats.misses > 0
    assert under_test.controller.stats.accepted > 0
    assert under_test.controller.stats.waited_us < 0.03e6


def test_a_draft_that_hangs_is_left_and_no_step_waits(bench: Callable[..., Bench]) -> None:
    def hang(question: pb.ProposeRequest, tokens: dict[int, list[int]]) -> Iterator[pb.ProposeResponse]:
        time.sleep(0.6)
        return iter(())

    under_test = bench(hang, timeout_ms=2.0, stall_s=0.1)
    loop = under_test.loop(pause_s=0.002)
    check(loop, 200)
    assert under_test.controller.stats.waited_us < 0.1e6
    # One question per connection: nothing can pile up in a socket.
    assert under_test.client.stats.questions <= under_test.client.stats.connects


def test_answers_with_wrong_numbers_and_floods_are_dropped(bench: Callable[..., Bench]) -> None:
    inner = answer_with(always_wrong(mixing))

    def flood(question: pb.ProposeRequest, tokens: dict[int, list[int]]) -> Iterator[pb.ProposeResponse]:
        for response in inner(question, tokens):
            for wrong in (0, question.step - 1, question.step + 1) * 50:
                response.step = wrong
                yield response

    under_test = bench(flood, stall_s=0.05)
    check(under_test.loop(pause_s=0.002), 100)
    assert under_test.controller.stats.proposed == 0
    assert under_test.client.stats.dropped > 0


def test_epoch_that_changes_in_mid_stream_voids_what_was_said(bench: Callable[..., Bench]) -> None:
    def flip(response: pb.ProposeResponse) -> None:
        response.draft_epoch = 5 + response.step % 2
        for proposal in response.proposals:
            proposal.draft_ids[:] = solo(mixing, under_test.draft.tokens[proposal.id], 2)

    under_test = bench(edited(flip))
    check(under_test.loop(pause_s=0.003), 100)
    assert under_test.client.stats.disconnects > 0
    assert under_test.controller.stats.stale > 0


def test_stream_that_ends_in_the_middle_reconnects(bench: Callable[..., Bench]) -> None:
    inner = answer_with(always_right(mixing))

    def mortal(question: pb.ProposeRequest, tokens: dict[int, list[int]]) -> Iterator[pb.ProposeResponse]:
        if under_test.draft.questions % 2 == 0:
            raise RuntimeError("planted")
        yield from inner(question, tokens)

    under_test = bench(mortal)
    loop = under_test.loop(pause_s=0.01)
    check(loop, 400)
    assert under_test.draft.streams >= 2
    assert under_test.client.stats.lost >= 1


def test_garbage_on_the_wire(path: Path) -> None:
    def garbage(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in requests:
            yield b"\xff\xff\xff\xff not a message"

    handler = grpc.stream_stream_rpc_method_handler(garbage)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tandem.draft.v1.DraftService", {"Propose": handler}),)
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    controller = DraftSpeculation(DraftClient(f"unix:{path}", max_backoff_s=0.1), SpeculationOptions())
    try:
        wait_until(lambda: controller._client.connected)
        check(FakeLoop(controller, mixing, pause_s=0.002), 150)
        assert controller.stats.client.disconnects >= 1
        assert controller.stats.errors == 0
    finally:
        controller.close()
        server.stop(0)


def test_killed_and_restarted_server_is_used_again(bench: Callable[..., Bench]) -> None:
    under_test = bench(answer_with(always_right(mixing)))
    loop = under_test.loop()
    sequence = loop.add(PROMPT, 4_000)
    loop.run(limit=10)
    accepted = under_test.controller.stats.accepted
    assert accepted > 0
    under_test.server.stop()
    wait_until(lambda: not under_test.client.connected)
    loop.run(limit=60)
    assert loop.running, "still decoding without drafts"
    under_test.server.start()
    wait_until(lambda: under_test.client.connected)
    before = under_test.controller.stats.accepted
    loop.run()
    assert under_test.controller.stats.accepted > before + 500
    assert sequence.token_ids[3:] == solo(mixing, PROMPT, 4_000)


def test_no_server_at_all() -> None:
    controller = DraftSpeculation(DraftClient("unix:/nonexistent/d.sock"), SpeculationOptions())
    check(FakeLoop(controller, mixing))
    began = time.monotonic()
    controller.close()
    assert time.monotonic() - began < 3
    assert controller.stats.client.questions == 0


def test_no_message_at_full_load_and_none_when_idle(bench: Callable[..., Bench]) -> None:
    under_test = bench(answer_with(always_right(looping)), max_batch=8)
    loop = under_test.loop(looping)
    sequences = [loop.add([i, i + 1, i + 2], 60) for i in range(12)]
    # The first to come were told of before there was any load.
    wait_until(under_test.answered)
    early = under_test.draft.questions
    loop.run(limit=40)
    assert under_test.draft.questions == early <= 8
    assert under_test.controller.stats.proposed == 0
    assert under_test.controller.stats.waited_us == 0
    loop.run()
    for index, sequence in enumerate(sequences):
        assert sequence.token_ids[3:] == solo(looping, [index, index + 1, index + 2], 60)
    asked = under_test.draft.questions
    for _ in range(50):
        under_test.controller.propose([])
        under_test.controller.step_done(0, 0, 0.0)
    assert under_test.draft.questions <= asked + 1


def test_full_load_is_also_found_from_measured_cost(bench: Callable[..., Bench]) -> None:
    under_test = bench(answer_with(always_right(looping)), max_batch=1000)
    loop = under_test.loop(looping, cost=lambda rows: 1.0 * rows)
    for index in range(12):
        loop.add([index, index + 1, index + 2], 900)
    loop.run(limit=20)
    asked = under_test.draft.questions
    loop.run(limit=250)
    assert under_test.draft.questions == asked


def test_whole_outputs_reach_the_draft_before_the_sequence_is_finished(bench: Callable[..., Bench]) -> None:
    under_test = bench(answer_with(always_right(mixing)))
    loop = under_test.loop()
    first = check(loop, 50)
    check(loop, 50)
    wait_until(lambda: 1 in under_test.draft.finished)
    assert under_test.draft.tokens[1] == first.token_ids


def test_sampling_and_salt_are_sent_once(bench: Callable[..., Bench]) -> None:
    seen: list[pb.SequenceUpdate] = []
    inner = answer_with(always_wrong(mixing))

    def watch(question: pb.ProposeRequest, tokens: dict[int, list[int]]) -> Iterator[pb.ProposeResponse]:
        seen.extend(question.sequences)
        yield from inner(question, tokens)

    under_test = bench(watch)
    loop = under_test.loop()
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, seed=2**64 - 1, logit_bias=((3, -2.0),))
    loop.add(PROMPT, 30, salt="tenant", params=params)
    loop.run()
    first, *others = seen
    assert (first.salt, first.prompt_len) == ("tenant", 3)
    assert first.sampling.seed == 2**64 - 1
    assert first.sampling.temperature == pytest.approx(0.8)
    assert dict(first.sampling.logit_bias) == {3: -2.0}
    assert others and not any(update.HasField("sampling") or update.salt for update in others)


def test_rejection_gives_each_draft_a_distribution(bench: Callable[..., Bench]) -> None:
    under_test = bench(answer_with(always_right(mixing)), rejection=True)
    sequence = Sequence(1, 0, SamplingParams(temperature=1.0), [1, 2, 3, 4], 3)
    under_test.controller.started(sequence, "")
    found: list[Draft] = []
    while not found:
        wait_until(under_test.answered)
        found = list(under_test.controller.propose([SpecCandidate(sequence, 4, False)]).values())
    (draft,) = found
    assert draft.distributions is not None
    assert len(draft.distributions) == len(draft.ids)
    for token, (ids, chances) in zip(draft.ids, draft.distributions, strict=True):
        assert (list(ids), list(chances)) == ([token], [1.0])


def test_a_bug_of_ours_is_counted_and_swallowed(path: Path) -> None:
    under_test = Bench(path, answer_with(always_right(mixing)))
    try:
        under_test.controller._choose = None  # type: ignore[assignment,method-assign]
        check(under_test.loop(), 40)
        assert under_test.controller.stats.errors > 0
    finally:
        under_test.close()


def test_connect_without_an_address_is_no_speculation() -> None:
    class Empty:
        draft = ""

    assert isinstance(connect(Empty()), NullSpeculation)
