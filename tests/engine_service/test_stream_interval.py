"""Tokens of short steps leave together; whatever else happens leaves at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from engine_service.jobs import JobReport, StepReport
from engine_service.output import ChoiceOutput, ChoiceUpdate
from engine_service.policy import SchedulerConfig
from engine_service.text import Finish, StopRules
from tandem.lm.types import Slice, SliceOutput, TokenScore
from tests.engine_service.fakes import FakeRunner
from tests.engine_service.harness import TOKENIZER, Harness

STEP_S = 0.004


class Timed(Harness):
    """Each step takes STEP_S, or more with many prompt tokens; notes when which report came."""

    def __init__(self, hold: float) -> None:
        runner = FakeRunner(num_blocks=64)
        super().__init__(runner, SchedulerConfig(8, 64, 64))
        self.loop._hold = hold
        self.reports: list[tuple[float, list[int]]] = []
        execute = runner.execute

        def timed(slices: list[Slice]) -> list[SliceOutput]:
            self.now += STEP_S * max(1, sum(piece.count for piece in slices) // 8)
            return execute(slices)

        runner.execute = timed  # type: ignore[method-assign]

    def _report(self, report: StepReport) -> None:
        super()._report(report)
        sizes = [len(update.ids) for job in report.jobs for update in job.updates]
        if sizes:
            self.reports.append((self.now, sizes))


def test_without_an_interval_each_step_is_reported() -> None:
    engine = Timed(0.0)
    engine.add([1, 2, 3], 8)
    engine.finish()
    assert [sizes for _, sizes in engine.reports] == [[1]] * 8


def test_short_steps_share_a_report_and_no_token_waits_longer() -> None:
    engine = Timed(0.010)
    request = engine.add([1, 2, 3], 9)
    engine.finish()
    # The first token and the last leave at once, the others by two: a third step would end after 12 ms.
    assert [sizes for _, sizes in engine.reports] == [[1], [2], [2], [2], [2]]
    times = [at for at, _ in engine.reports]
    assert all(later - earlier <= 0.010 for earlier, later in itertools.pairwise(times))
    assert engine.results[request].outputs[0] == engine.expect([1, 2, 3], engine.requests[request].params, 0, 9)


def test_steps_longer_than_half_the_interval_are_reported_each() -> None:
    engine = Timed(1.5 * STEP_S)
    engine.add([1, 2, 3], 6)
    engine.finish()
    assert [sizes for _, sizes in engine.reports] == [[1]] * 6


def test_held_tokens_leave_before_a_long_step() -> None:
    engine = Timed(0.010)
    engine.add([1, 2, 3], 20)
    engine.step()
    engine.step()
    assert len(engine.reports) == 1  # the second token is held
    began = engine.now
    engine.add([*range(40)], 1)
    engine.step()
    assert engine.reports[1] == (began, [1])
    assert engine.now - began >= 4 * STEP_S


def test_an_end_is_reported_at_once_with_what_was_held() -> None:
    engine = Timed(1.0)
    engine.add([1, 2, 3], 5)
    engine.finish()
    assert [sizes for _, sizes in engine.reports] == [[1], [4]]


def test_a_cancelled_request_with_an_error_is_reported_at_once() -> None:
    engine = Timed(1.0)
    request = engine.add([1, 2, 3], 50, deadline=0.020)
    for _ in range(8):
        engine.step()
    error = engine.results[request].error
    assert error is not None and error.reason == "DEADLINE"
    assert sum(sum(sizes) for _, sizes in engine.reports) == len(engine.results[request].outputs[0]) == 5


def score(token: int) -> TokenScore:
    return TokenScore(token, -1.0, 1)


def test_updates_of_a_choice_become_one() -> None:
    report = JobReport(request=None)  # type: ignore[arg-type]
    report.add(ChoiceUpdate(0, [1, 2], [score(1), score(2)], 0b1, "ab", None), 0.1)
    report.add(ChoiceUpdate(1, [9], None, 0, None, None), 0.1)
    report.add(ChoiceUpdate(0, [3, 4], [score(3), score(4)], 0b1, "c", Finish("stop")), 0.2)
    assert report.times == [0.1, 0.2]
    assert report.updates == [
        ChoiceUpdate(0, [1, 2, 3, 4], [score(t) for t in (1, 2, 3, 4)], 0b101, "abc", Finish("stop")),
        ChoiceUpdate(1, [9], None, 0, None, None),
    ]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_held_updates_say_the_same_as_separate_ones(single: bool, stops: tuple[str, ...]) -> None:
    pieces = [[*"aé".encode()], [*b"b"], [*"ñ".encode(), *b"c"]]

    def updates() -> list[ChoiceUpdate]:
        text = ("a\u00e9", "b", "\u00f1c") if stops else (None, None, None)
        ends = (None, None, Finish("length"))
        return [ChoiceUpdate(0, ids, None, 0, text[at], ends[at]) for at, ids in enumerate(pieces)]

    def said(given: list[ChoiceUpdate]) -> tuple[Any, ...]:
        output = ChoiceOutput(0, StopRules(stops=stops), TOKENIZER, final_only=False, single_tokens=single)
        events = [event for update in given for event in output.events(update)]
        deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
        ids = [token for delta in deltas for token in delta.ids]
        finished = [event.finished.reason for event in events if event.WhichOneof("event") == "finished"]
        return "".join(delta.text for delta in deltas), ids, finished

    first, second, third = updates()
    assert said([first.then(second).then(third)]) == said(updates())
