"""Drives the step loop by hand, with a clock of its own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from engine_service.jobs import Job, StepReport
from engine_service.loop import StepLoop
from engine_service.policy import SchedulerConfig
from engine_service.requests import Choice, Request
from engine_service.scheduler import Scheduler
from engine_service.speculation import NullSpeculation, SpeculationController
from engine_service.text import StopRules, StopTracker
from tandem.errors import TandemError
from tandem.lm.block_pool import BlockPool
from tandem.lm.types import SamplingParams, Sequence
from tests.engine_service.fakes import FakeRunner, byte_tokenizer

TOKENIZER = byte_tokenizer()


@dataclass
class Result:
    """What the loop reported for a request."""

    outputs: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    error: TandemError | None = None
    prompt_scores: int | None = None


class Harness:
    def __init__(
        self,
        runner: FakeRunner,
        config: SchedulerConfig,
        speculation: SpeculationController | None = None,
        caching: bool = True,
    ) -> None:
        self.now = 0.0
        self.runner = runner
        self.pool = BlockPool(runner.spec.num_blocks, runner.spec.block_size, caching=caching)
        self.scheduler = Scheduler(config, self.pool)
        self.loop = StepLoop(
            runner, self.scheduler, speculation or NullSpeculation(), self._report, clock=lambda: self.now
        )
        self.results: dict[int, Result] = {}
        self.requests: dict[int, Request] = {}
        self._ids = itertools.count(1)
        self._sequence_ids = itertools.count(1)

    def add(
        self,
        prompt: list[int],
        max_output: int,
        *,
        n: int = 1,
        params: SamplingParams | None = None,
        rules: StopRules | None = None,
        salt: bytes = b"",
        priority: int = 0,
        deadline: float | None = None,
        score_prompt: bool = False,
        emitted: dict[int, list[int]] | None = None,
    ) -> int:
        params = params or SamplingParams(temperature=0.0, prompt_logprobs=0 if score_prompt else None)
        request = Request(
            next(self._ids),
            "",
            params,
            prompt,
            self.now,
            salt=salt,
            priority=priority,
            deadline=deadline,
            score_prompt=score_prompt,
        )
        job = Job(request, {})
        for index in range(n):
            ids = (emitted or {}).get(index, [])
            sequence = Sequence(next(self._sequence_ids), index, params, [*prompt, *ids], len(prompt))
            if isinstance(self.runner, FakeRunner):
                self.runner.salts[sequence.id] = salt
            choice = Choice(request, sequence, max_output)
            request.choices.append(choice)
            job.trackers[index] = StopTracker(choice, rules or StopRules(), TOKENIZER)
        self.requests[request.id] = request
        self.results[request.id] = Result()
        self.loop.submit(job)
        return request.id

    def step(self) -> bool:
        worked = self.loop.step()
        self.runner.poison(self.scheduler, self.pool)
        self.scheduler.check()
        for choice in self.scheduler.running:
            self.runner.verify(choice)
        return worked

    def finish(self, limit: int = 2000) -> None:
        """Steps until nothing is left."""
        for _ in range(limit):
            if not self.step() and not self.scheduler.has_work:
                return
        raise AssertionError(f"{len(self.scheduler.requests)} requests do not end")

    def expect(self, prompt: list[int], params: SamplingParams, choice: int, count: int) -> list[int]:
        """What the fake model says, computed without any engine."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(self.runner.next_token(ids, params, choice))
        return ids[len(prompt) :]

    def _report(self, report: StepReport) -> None:
        for job in report.jobs:
            result = self.results[job.request.id]
            if job.error is not None:
                result.error = job.error
            if job.prompt_scores is not None:
                assert result.prompt_scores is None, "prompt scores came twice"
                result.prompt_scores = len(job.prompt_scores)
            for update in job.updates:
                assert update.choice not in result.finishes, "output after the end"
                result.outputs.setdefault(update.choice, []).extend(update.ids)
                result.texts[update.choice] = result.texts.get(update.choice, "") + (update.text or "")
                if update.finish is not None:
                    result.finishes[update.choice] = update.finish.reason
