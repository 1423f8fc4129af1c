"""The head beside the draft service: who drafts for which sequence, at what price, and when neither does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from engine_service.speculation import head as head_module
from engine_service.speculation.client import DraftClient, NoClient
from engine_service.speculation.control import CostModel
from engine_service.speculation.controller import DraftSpeculation, SpeculationOptions, connect
from engine_service.speculation.head import Calibration, HeadSource, HeadState, load
from engine_service.speculation.stats import HeadStats
from tandem.draft.v1 import draft_pb2 as pb
from tandem.inference.v1 import inference_pb2 as inference
from tandem.lm.proposers.head_file import HeadError, save_head
from tandem.lm.types import SamplingParams, Sequence
from tests.engine_service.fakes import FakeRunner
from tests.engine_service.server import ask, serve, until
from tests.engine_service.speculation.fakes import (
    VOCAB,
    DraftServer,
    FakeLoop,
    ScriptedDraft,
    answer_with,
    looping,
    mixing,
    solo,
    wait_until,
)
from tests.heads import Oracle, random_head

PROMPT = [1, 2, 3]
# Of a small model on a CPU, by rows.
CPU = {1: 7.0, 2: 8.1, 3: 9.1, 4: 10.0, 6: 13.0, 8: 15.5}


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="td") as name:
        yield Path(name) / "d.sock"


def cost(rows: int) -> float:
    return float(np.interp(rows, list(CPU), list(CPU.values())))


def taught() -> CostModel:
    model = CostModel()
    for _ in range(20):
        for rows, took in CPU.items():
            model.learn(rows, took)
    return model


def oracle(target: Callable[[list[int]], int] = mixing, right: bool = True) -> Oracle:
    return Oracle(lambda sequence: solo(target, sequence.token_ids, 8), VOCAB, right)


def alone(head: object) -> DraftSpeculation:
    return DraftSpeculation(NoClient(), SpeculationOptions(vocab_size=VOCAB), head=head)  # type: ignore[arg-type]


def test_a_head_that_is_right_is_used_and_counted() -> None:
    speculation = alone(oracle())
    loop = FakeLoop(speculation, mixing, cost=cost)
    sequence = loop.add(PROMPT, 300)
    loop.run()
    assert sequence.token_ids[3:] == solo(mixing, PROMPT, 300)
    stats = speculation.stats
    assert stats.errors == 0 and set(stats.proposers) == {"head"}
    assert stats.accepted > 150 and loop.steps < 200
    assert stats.head.calls > 0 and stats.head.drafted >= stats.proposed and stats.head.spent_us > 0
    assert stats.snapshot()["head"]["drafted"] == stats.head.drafted


def test_a_head_that_is_wrong_is_given_up_but_for_rare_trials() -> None:
    speculation = alone(oracle(right=False))
    loop = FakeLoop(speculation, mixing, cost=cost)
    sequence = loop.add(PROMPT, 3_000)
    loop.run()
    assert sequence.token_ids[3:] == solo(mixing, PROMPT, 3_000)
    assert speculation.stats.head.calls < 60
    assert loop.fake_ms < 3_000 * CPU[1] * 1.02


def test_a_head_that_becomes_right_is_found_again() -> None:
    head = oracle(right=False)
    speculation = alone(head)
    loop = FakeLoop(speculation, mixing, cost=cost)
    loop.add(PROMPT, 2_000)
    loop.run(limit=300)
    head._right = True
    before = speculation.stats.accepted
    loop.run(limit=1_200)
    assert speculation.stats.accepted > before + 100


def test_what_drafting_costs_decides() -> None:
    """The same head pays where a token of it is cheap and not where it costs as much as a step."""
    state, sequence = HeadState(), Sequence(1, 0, SamplingParams(temperature=0.0), [1, 2], 1)
    for token_ms, pays in ((0.3, True), (7.0, False)):
        source = HeadSource(oracle(), HeadStats())  # type: ignore[arg-type]
        source._cost[1] = token_ms
        source.keep(state, sequence, np.zeros(4, np.float32))
        assert bool(source.plan([(state, sequence, 8)], 1, taught())[0]) == pays
        assert (source.yields(state, sequence, 1, taught()) > 0) == pays
    expensive_rows = CostModel()
    for rows in range(1, 9):
        expensive_rows.learn(rows, 7.0 * rows)
    source = HeadSource(oracle(), HeadStats())  # type: ignore[arg-type]
    assert source.plan([(state, sequence, 8)], 1, expensive_rows) == [0]


def test_states_of_other_tokens_are_not_used() -> None:
    source = HeadSource(oracle(), HeadStats())  # type: ignore[arg-type]
    state, sequence = HeadState(), Sequence(1, 0, SamplingParams(temperature=0.0), [1, 2], 1)
    source.keep(state, sequence, np.zeros(4, np.float32))
    sequence.token_ids.append(9)
    assert not source.ready(state, sequence)
    assert source.plan([(state, sequence, 8)], 1, taught()) == [0]


def test_claims_are_believed_as_they_fare() -> None:
    calibration = Calibration()
    assert calibration.chance(True, 0, 0.9) == pytest.approx(0.9)
    for turn in range(400):
        calibration.learn(True, 0, 0.92, turn % 2 == 0)
    assert calibration.chance(True, 0, 0.95) == pytest.approx(0.5, abs=0.05)
    assert calibration.chance(True, 1, 0.95) == pytest.approx(0.95)
    assert calibration.chance(True, 0, 0.35) == pytest.approx(0.35)


def both(
    path: Path, guess: Callable[[list[int], int], list[int]], head: Oracle
) -> tuple[DraftServer, DraftSpeculation]:
    server = DraftServer(path, ScriptedDraft(answer_with(guess)))
    client = DraftClient(f"unix:{path}", max_backoff_s=0.1)
    options = SpeculationOptions(timeout_ms=500.0, vocab_size=VOCAB)
    speculation = DraftSpeculation(client, options, head=head)  # type: ignore[arg-type]
    wait_until(lambda: client.connected)
    return server, speculation


def test_long_copies_come_from_the_service_and_the_rest_from_the_head(path: Path) -> None:
    """The service knows one of two sequences; the head is right for the first two tokens of either."""

    def guess(tokens: list[int], want: int) -> list[int]:
        right = solo(looping, tokens, want)
        return right if tokens[0] == 1 else [(token + 1) % VOCAB for token in right]

    head = Oracle(lambda sequence: [*solo(looping, sequence.token_ids, 2), 0, 0], VOCAB)
    server, speculation = both(path, guess, head)
    try:
        by: dict[int, dict[str, int]] = {}
        observe = speculation.observe

        def watch(sequence_id: int, proposer: str, proposed: int, accepted: int, ids: list[int]) -> None:
            by.setdefault(sequence_id, {}).setdefault(proposer, 0)
            by[sequence_id][proposer] += accepted
            observe(sequence_id, proposer, proposed, accepted, ids)

        speculation.observe = watch  # type: ignore[method-assign]
        loop = FakeLoop(
            speculation,
            looping,
            cost=cost,
            ready=lambda: speculation._client._pending_step == 0,  # type: ignore[union-attr]
        )
        sequences = [loop.add([first, 2, 3], 400) for first in (1, 7)]
        loop.run()
        for sequence in sequences:
            assert sequence.token_ids[3:] == solo(looping, sequence.token_ids[:3], 400)
        assert by[sequences[0].id]["scripted"] > by[sequences[0].id].get("head", 0)
        assert by[sequences[1].id]["head"] > 50 and not by[sequences[1].id].get("scripted")
        assert speculation.stats.errors == 0
    finally:
        speculation.close()
        server.stop()


def test_a_service_that_brings_no_more_than_the_head_is_hardly_asked(path: Path) -> None:
    server, speculation = both(path, lambda tokens, want: [(mixing(tokens) + 1) % VOCAB] * want, oracle())
    try:
        loop = FakeLoop(speculation, mixing, cost=cost, pause_s=0.001)
        loop.add(PROMPT, 1_500)
        loop.run()
        assert speculation.stats.accepted > 700
        assert server.servicer.questions < 0.15 * loop.steps  # type: ignore[attr-defined]
    finally:
        speculation.close()
        server.stop()


@pytest.mark.parametrize("with_head", [False, True])
async def test_no_message_and_no_draft_at_full_load(path: Path, with_head: bool) -> None:
    """A real engine server with 32 sequences running: the draft service is not asked and the head not run."""
    questions: list[int] = []

    def count(question: pb.ProposeRequest, tokens: dict[int, list[int]]) -> Iterator[pb.ProposeResponse]:
        questions.append(len(question.sequences))
        return iter(())

    server = DraftServer(path, ScriptedDraft(count))
    runner = FakeRunner(num_blocks=2_000, max_model_len=512)
    runner.step_seconds = 0.004
    head = Oracle(lambda sequence: [1, 2, 3], 258) if with_head else None
    speculation = DraftSpeculation(
        DraftClient(f"unix:{path}"),
        SpeculationOptions(vocab_size=258),
        head=head,  # type: ignore[arg-type]
    )
    await until(lambda: speculation._client.connected)
    request = ask("x" * 20, stop=inference.StopConditions(max_tokens=120, ignore_eos=True))
    async with serve(runner, speculation, max_num_seqs=32, max_num_batched_tokens=1024) as engine:
        answers = [asyncio.ensure_future(engine.generate(request)) for _ in range(32)]
        stats = engine.engine.stats
        await until(lambda: stats.running == 32)
        await asyncio.sleep(0.05)
        early, drafted, steps = len(questions), speculation.stats.head.drafted, stats.steps
        await until(lambda: stats.steps >= steps + 40 or stats.running < 32)
        assert stats.running == 32, "load fell before it was measured"
        assert len(questions) == early and speculation.stats.head.drafted == drafted
        assert not any(piece.hidden for piece in runner.slices)
        await asyncio.gather(*answers)
    server.stop()


def test_which_head_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = FakeRunner()
    runner.spec = replace(runner.spec, hidden_size=32, gives_hidden=True)
    good, other = random_head(runner.spec), replace(random_head(runner.spec), target_digest="other")
    monkeypatch.setattr(head_module, "SHIPPED", tmp_path)
    assert load("none", runner) is None
    with caplog.at_level(logging.INFO):
        assert load("auto", runner) is None
        assert "none is shipped" in caplog.text
        save_head(tmp_path / "a.head.safetensors", other)
        (tmp_path / "b.head.safetensors").write_bytes(b"broken")
        assert load("auto", runner) is None
        assert "trained for the model of digest other" in caplog.text and "no safetensors file" in caplog.text
    save_head(tmp_path / "c.head.safetensors", good)
    assert load("auto", runner) is not None
    assert load(str(tmp_path / "c.head.safetensors"), runner) is not None
    for name, reason in (("a", "digest other"), ("b", "no safetensors file"), ("d", "cannot be read")):
        with pytest.raises(HeadError, match=reason) as caught:
            load(str(tmp_path / f"{name}.head.safetensors"), runner)
        assert str(caught.value).count(f"{name}.head.safetensors") == 1
    runner.spec = replace(runner.spec, gives_hidden=False)
    with pytest.raises(HeadError, match="gives no hidden states"):
        load(str(tmp_path / "c.head.safetensors"), runner)
    assert load("auto", runner) is None


def test_a_head_alone_needs_no_draft_service() -> None:
    class Settings:
        draft = ""
        max_drafts = 4

    speculation = connect(Settings(), VOCAB, oracle())  # type: ignore[arg-type]
    assert isinstance(speculation, DraftSpeculation) and speculation.wants_hidden()
    speculation.close()
