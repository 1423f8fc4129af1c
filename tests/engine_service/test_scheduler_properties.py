"""Stateful property test: any mix of requests, cancels, deadlines and resets over a small pool keeps all promises."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine_service.plan import StepPlan
from engine_service.policy import SchedulerConfig
from tandem.lm.types import SamplingParams
from tests.engine_service.fakes import FakeRunner, FakeSpeculation
from tests.engine_service.harness import Harness

VOCAB = 258
MAX_LEN = 32
BLOCK = 4


class SchedulerMachine(RuleBasedStateMachine):
    """The pool holds one sequence of the greatest length, plus `spare` blocks."""

    @initialize(
        spare=st.integers(0, 12),
        seqs=st.integers(1, 5),
        budget=st.integers(5, 24),
        chunk=st.integers(1, 12),
        policy=st.sampled_from(["fcfs", "priority"]),
        speculate=st.booleans(),
        caching=st.booleans(),
    )
    def build(
        self, spare: int, seqs: int, budget: int, chunk: int, policy: str, speculate: bool, caching: bool
    ) -> None:
        runner = FakeRunner(MAX_LEN // BLOCK + spare, BLOCK, VOCAB, MAX_LEN)
        speculation = FakeSpeculation(runner.next_token, VOCAB) if speculate else None
        config = SchedulerConfig(seqs, budget, chunk, policy, priority_age_s=5.0)
        self.h = Harness(runner, config, speculation, caching)
        self.speculation = speculation
        self.seqs, self.budget = seqs, budget
        self.alive: list[int] = []
        self.doomed: set[int] = set()
        plan = self.h.scheduler.plan

        def checked(drafts: dict[int, tuple[int, ...]] | None = None) -> StepPlan:
            result = plan(drafts)
            self.check_plan(result)
            return result

        self.h.scheduler.plan = checked  # type: ignore[method-assign]

    def check_plan(self, plan: StepPlan) -> None:
        scheduler = self.h.scheduler
        assert plan.tokens <= self.budget
        assert len(plan.entries) <= self.seqs
        assert plan.entries or not scheduler.has_work, "work is there, but nobody goes on"
        holders = [choice for choice in scheduler.running if choice.blocks]
        for victim in plan.preempted:
            assert all(scheduler.key(holder) < scheduler.key(victim) for holder in holders)

    @rule(
        stem=st.integers(0, 2),
        stem_len=st.integers(0, 16),
        tail=st.lists(st.integers(0, 3), max_size=6),
        output=st.integers(0, 14),
        n=st.integers(1, 3),
        seed=st.one_of(st.none(), st.integers(0, 3)),
        salt=st.sampled_from([b"", b"s", b"t"]),
        priority=st.integers(-2, 2),
        wait=st.one_of(st.none(), st.floats(0.5, 20)),
        scored=st.booleans(),
        emitted=st.integers(0, 3),
    )
    def add(
        self,
        stem: int,
        stem_len: int,
        tail: list[int],
        output: int,
        n: int,
        seed: int | None,
        salt: bytes,
        priority: int,
        wait: float | None,
        scored: bool,
        emitted: int,
    ) -> None:
        n = min(n, self.seqs)
        prompt = [*([stem] * stem_len), *tail] or [stem]
        prompt = prompt[: MAX_LEN - 1]
        output = min(output, MAX_LEN - len(prompt))
        scored = scored and emitted == 0
        params = SamplingParams(
            temperature=0.0 if seed is None else 1.0, seed=seed or 0, prompt_logprobs=1 if scored else None
        )
        already = {
            index: self.h.expect(prompt, params, index, min(emitted, max(0, output - 1))) for index in range(0, n, 2)
        }
        deadline = None if wait is None else self.h.now + wait
        request = self.h.add(
            prompt,
            output,
            n=n,
            params=params,
            salt=salt,
            priority=priority,
            deadline=deadline,
            score_prompt=scored,
            emitted=already,
        )
        self.alive.append(request)
        if wait is not None:
            self.doomed.add(request)

    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        if self.alive:
            request = self.alive.pop(pick % len(self.alive))
            self.doomed.discard(request)
            self.h.loop.cancel(request)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.h.step()
            self.h.now += 0.1

    @rule(seconds=st.floats(0.1, 10))
    def time_passes(self, seconds: float) -> None:
        self.h.now += seconds

    @rule()
    def reset(self) -> None:
        self.h.pool.reset()

    @invariant()
    def books_add_up(self) -> None:
        pool = self.h.pool
        assert pool.num_free + pool.num_used == pool.num_blocks
        assert len(self.h.scheduler.running) <= self.seqs

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        self.h.finish()
        assert self.h.pool.num_used == 0
        if self.speculation is not None:
            assert not self.speculation.live
        for request_id in self.alive:
            self.check_result(request_id)

    def check_result(self, request_id: int) -> None:
        request, result = self.h.requests[request_id], self.h.results[request_id]
        if result.error is not None:
            assert result.error.reason == "DEADLINE" and request_id in self.doomed
            return
        for index, choice in enumerate(request.choices):
            wanted = self.h.expect(request.prompt, request.params, index, choice.max_output)
            assert choice.sequence.token_ids == [*request.prompt, *wanted]
            assert result.finishes[index] == "length"
        if request.score_prompt and len(request.prompt) > 1:
            assert result.prompt_scores == len(request.prompt) - 1


def _runs(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = _runs(100, 25)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_scheduler_for_long() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=_runs(2000, 40))
