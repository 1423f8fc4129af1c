"""The step loop: one thread that plans, computes and commits, over and over.

It never touches the event loop: it reports steps through `sink`, at most one call per step, which hands the report
over. What no later step needs (detokenisation, logprobs, messages) is made from the report on the other side. Tokens of
short steps wait for those of the next ones, `hold` seconds at most: a message costs as much as a step's Python.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from engine_service.drafting import Drafting
from engine_service.grammar import GrammarMatcher
from engine_service.inbox import Cancel, Inbox
from engine_service.jobs import Job, JobReport, StepReport
from engine_service.output import ChoiceUpdate
from engine_service.plan import Entry, StepPlan
from engine_service.requests import Choice, Request, Status
from engine_service.scheduler import Scheduler
from engine_service.speculation import SpeculationController
from engine_service.stats import LoopStats
from engine_service.text import Settled
from tandem.errors import TandemError
from tandem.lm.types import Runner, Slice, SliceOutput, TokenScore

log = logging.getLogger(__name__)

_RETRY_S = 0.05
_EXPLAIN = {"NO_ALLOWED_TOKEN": "masks, bans and grammar leave no token to sample"}


class StepLoop:
    """Owns scheduler, runner and speculation; other threads talk to it through submit, cancel and call."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        speculation: SpeculationController,
        sink: Callable[[StepReport], None],
        clock: Callable[[], float] = time.monotonic,
        hold: float = 0.0,
    ) -> None:
        """hold: seconds that tokens may wait to be reported together with later ones; 0: each step is reported."""
        self.runner = runner
        self.scheduler = scheduler
        self.stats = LoopStats()
        self._drafting = Drafting(speculation, runner.spec.vocab_size, self._matcher)
        self._sink = sink
        self._clock = clock
        self._inbox = Inbox()
        self._stopping = False
        self._jobs: dict[int, Job] = {}
        self._reports: dict[int, JobReport] = {}
        self._hold = hold
        # When the last report went out, and whether the next one has more in it than further tokens.
        self._reported = 0.0
        self._urgent = False
        # Seconds that the last step took.
        self._last_step = 0.0
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    # For other threads

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a request; it takes part in the next step that has room."""
        self.stats.submitted(job.request)
        self._inbox.put(job)

    def cancel(self, request_id: int, error: TandemError | None = None) -> None:
        """Ends a request before the next step. With an error that is reported, else silently."""
        self._inbox.put(Cancel(request_id, error))

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs something in the step thread between two steps."""
        return self._inbox.put_call(work)

    def stop(self, timeout: float | None = None) -> bool:
        """Ends the thread after the step that runs. False if it did not end in time."""
        self._stopping = True
        self._inbox.ring()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        while not self._stopping:
            self._inbox.quiet()
            if not self.step():
                self._idle()
        self._inbox.close()
        self._drafting.close()

    def _idle(self) -> None:
        """Waits for work. The books are verified when it turns idle."""
        if self._inbox:
            return
        try:
            self.scheduler.check()
        except RuntimeError:
            log.exception("the block pool's books do not add up")
            self.stats.last_error = "block pool integrity check failed"
        # Work that a runner keeps for idle gaps, a piece at a time: capturing decode steps on a GPU.
        more = getattr(self.runner, "idle", None)
        if more is not None and more():
            return
        deadline = self.scheduler.next_deadline()
        timeout = None if deadline is None else max(0.0, deadline - self._clock())
        if self._drafting.idle():
            timeout = min(timeout or _RETRY_S, _RETRY_S)
        if self.scheduler.has_work:
            # The scheduler always finds something to do for the first in order; should it not, do not sleep on it.
            timeout = min(timeout or _RETRY_S, _RETRY_S)
        self._inbox.wait(timeout)

    def step(self) -> bool:
        """One turn: take orders, plan, compute, commit, report. False if there was nothing to compute."""
        now = self._clock()
        self._take_orders()
        for request in self.scheduler.expire(now):
            self._drop(
                request, TandemError("DEADLINE", f"the request's deadline passed after {now - request.arrival:.3f} s")
            )
        plan = self.scheduler.plan(self._drafting.ask(self.scheduler.decoding()) if self._drafting.on else None)
        self.stats.snapshot(self.scheduler)
        if plan.entries:
            self.stats.step_begins()
            self._compute(plan, now)
        else:
            self._report()
        return bool(plan.entries)

    def _take_orders(self) -> None:
        for order in self._inbox.orders():
            if isinstance(order, Job):
                self._add(order)
            elif (request := self.scheduler.cancel(order.request_id)) is not None:
                self._drop(request, order.error)
        # One per turn, so that a row of them does not hold up the batch.
        call = self._inbox.next_call()
        if call is not None:
            self._report()
            self.stats.step_begins()
            try:
                call.future.set_result(call.work())
            except Exception as error:
                call.future.set_exception(error)
            self.stats.call_ends()

    def _add(self, job: Job) -> None:
        request = job.request
        try:
            self.scheduler.add(request)
        except TandemError as error:
            self._report_of(request).error = error
            self.stats.left_queue(request)
            return
        self._jobs[request.id] = job

    def _drop(self, request: Request, error: TandemError | None) -> None:
        """Forgets a request that the scheduler has let go."""
        self._jobs.pop(request.id, None)
        self.stats.left_queue(request)
        for choice in request.choices:
            self._forget(choice)
        if error is not None:
            self._report_of(request).error = error

    def _forget(self, choice: Choice) -> None:
        if self._drafting.forget(choice):
            self.runner.forget(choice.sequence.id)

    def _fail(self, request: Request, error: TandemError) -> None:
        if self.scheduler.cancel(request.id) is not None:
            self._drop(request, error)

    def _matcher(self, choice: Choice) -> GrammarMatcher | None:
        job = self._jobs.get(choice.request.id)
        return job.matcher(choice) if job is not None else None

    # Compute and commit

    def _compute(self, plan: StepPlan, now: float) -> None:
        for entry in plan.entries:
            self._note_start(entry, now)
        slices = self._slices(plan)
        try:
            if plan.copies:
                self.runner.copy_blocks(plan.copies)
            # Not before: whoever takes the report wants the interpreter lock, and the runner is about to leave it.
            if not self._may_wait(plan, now):
                self._report()
            outputs = self.runner.execute([s for s in slices if s is not None])
        except Exception as error:
            log.exception("a step failed")
            self.stats.last_error = f"{type(error).__name__}: {error}"
            self.stats.call_ends()
            self._fail_step(plan)
            return
        done = self._clock()
        self._last_step = done - now
        # Before commit: what an entry samples is told by the tokens that it has not committed yet.
        rows, prefill = plan.sampled_rows, plan.prefill_tokens
        self.stats.step_ends(plan)
        results = iter(outputs)
        for entry, piece in zip(plan.entries, slices, strict=True):
            self._commit(entry, next(results) if piece is not None else None, done)
        self._drafting.step_done(rows, prefill, (done - now) * 1000)
        if self._urgent:
            self._report()

    def _note_start(self, entry: Entry, now: float) -> None:
        choice, request = entry.choice, entry.choice.request
        request.steps += 1
        if request.first_step is None:
            request.first_step = now
            self.stats.left_queue(request)
            self.stats.cached_tokens += request.cached_tokens
        self._drafting.announce(choice)

    def _slices(self, plan: StepPlan) -> list[Slice | None]:
        """The runner's orders. None where a grammar failed: that request has ended."""
        slices: list[Slice | None] = []
        for entry in plan.entries:
            piece = entry.to_slice()
            self._drafting.complete(piece)
            matcher = self._matcher(entry.choice)
            if matcher is not None and entry.samples:
                try:
                    piece.mask = matcher.masks(entry.drafts)
                except TandemError as error:
                    self._fail(entry.choice.request, error)
            slices.append(piece if entry.choice.status is Status.RUNNING else None)
        return slices

    def _fail_step(self, plan: StepPlan) -> None:
        """Ends the requests of a step that the runner could not do; others go on."""
        for entry in plan.entries:
            self._fail(entry.choice.request, TandemError("INTERNAL", "the engine failed to compute a step"))
            self.scheduler.commit(entry, (), 0, False)

    def _commit(self, entry: Entry, out: SliceOutput | None, now: float) -> None:
        """Books what the runner returned for an entry (None: its request ended before the step ran)."""
        choice, request = entry.choice, entry.choice.request
        if out is not None and out.error is not None and choice.status is Status.RUNNING:
            where = f"output token {choice.sequence.output_len} of choice {choice.sequence.choice}"
            self._fail(request, TandemError(out.error, f"{_EXPLAIN.get(out.error, out.error)} at {where}"))
        job = self._jobs.get(request.id)
        if out is None or job is None or choice.status is not Status.RUNNING:
            self.scheduler.commit(entry, (), 0, False)
            return
        if out.prompt_scores is not None and choice.wants_scores:
            self._add_scores(job, entry, out.prompt_scores)
        index = choice.sequence.choice
        try:
            settled = job.trackers[index].settle(out.token_ids) if entry.samples else Settled([], None, None)
        except TandemError as error:
            self._fail(request, error)
            self.scheduler.commit(entry, (), 0, False)
            return
        accepted = min(out.accepted, len(settled.ids))
        self.scheduler.commit(entry, settled.ids, accepted, settled.finish is not None)
        if settled.ids:
            self._account(entry, settled.ids, accepted, now)
            self._drafting.observe(entry, settled.ids, accepted, out.hidden)
        if settled.ids or settled.finish is not None:
            scores = out.scores[: len(settled.ids)] if out.scores is not None else None
            update = ChoiceUpdate(index, settled.ids, scores, (1 << accepted) - 1, settled.text, settled.finish)
            first = choice.sequence.output_len == len(settled.ids)
            self._urgent |= first or settled.finish is not None
            self._reports.setdefault(request.id, JobReport(request)).add(update, now)
        if settled.finish is not None:
            self._forget(choice)
            if not request.unfinished:
                self._jobs.pop(request.id, None)

    def _add_scores(self, job: Job, entry: Entry, scores: list[TokenScore]) -> None:
        """Keeps the scores of prompt positions that have none yet (a preempted request computes some twice)."""
        choice = entry.choice
        job.prompt_scores.extend(scores[max(0, choice.scored - entry.start) :])
        if len(job.prompt_scores) >= choice.sequence.prompt_len - 1:
            self._report_of(job.request).prompt_scores = job.prompt_scores

    def _account(self, entry: Entry, ids: list[int], accepted: int, now: float) -> None:
        request = entry.choice.request
        if request.first_token is None:
            request.first_token = now
        request.last_token = now
        self.stats.committed(len(ids), len(entry.drafts), accepted)

    # Reports

    def _report_of(self, request: Request) -> JobReport:
        """The report of something that does not wait."""
        self._urgent = True
        return self._reports.setdefault(request.id, JobReport(request))

    def _may_wait(self, plan: StepPlan, now: float) -> bool:
        """Whether nothing but further tokens is to be told, and a step like the last one ends in time."""
        if self._urgent or plan.prefill_tokens:
            return False
        return now - self._reported + self._last_step <= self._hold

    def _report(self) -> None:
        self._reported, self._urgent = self._clock(), False
        changes = self.scheduler.pool.take_changes()
        if self._reports or changes:
            reports, self._reports = list(self._reports.values()), {}
            self._sink(StepReport(reports, changes))
