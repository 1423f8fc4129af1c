"""The step loop: one thread that plans, computes and commits, over and over.

It never touches the event loop: it reports each step through `sink`, one call per step, which hands the report over.
Everything that no later step needs (detokenisation, logprobs, messages) is made from the report on the other side.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine_service.grammar import GrammarMatcher
from engine_service.output import ChoiceUpdate
from engine_service.plan import Entry, StepPlan
from engine_service.requests import Choice, Request, Status
from engine_service.scheduler import Scheduler
from engine_service.speculation import MAX_DRAFTS, Draft, SpecCandidate, SpeculationController
from engine_service.stats import LoopStats
from engine_service.text import Settled, StopTracker
from tandem.errors import TandemError
from tandem.lm.block_pool import KvChange
from tandem.lm.types import Runner, Slice, SliceOutput, TokenScore

log = logging.getLogger(__name__)

_RETRY_S = 0.05


@dataclass(slots=True, eq=False)
class Job:
    """A request with what the loop needs to run it: per unfinished choice a stop tracker and perhaps a grammar."""

    request: Request
    trackers: dict[int, StopTracker]
    matchers: dict[int, GrammarMatcher] = field(default_factory=dict)
    prompt_scores: list[TokenScore] = field(default_factory=list)


@dataclass(slots=True)
class JobReport:
    """What a step did for one request. `error` ends it."""

    request: Request
    updates: list[ChoiceUpdate] = field(default_factory=list)
    prompt_scores: list[TokenScore] | None = None
    error: TandemError | None = None


@dataclass(slots=True)
class StepReport:
    jobs: list[JobReport]
    changes: list[KvChange]


class StepLoop:
    """Owns scheduler, runner and speculation; other threads talk to it through submit, cancel and call."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        speculation: SpeculationController,
        sink: Callable[[StepReport], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.stats = LoopStats()
        self._speculation = speculation
        self._sink = sink
        self._clock = clock
        self._commands: deque[tuple[str, Any]] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._jobs: dict[int, Job] = {}
        self._started: set[int] = set()
        self._reports: dict[int, JobReport] = {}
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    # For other threads

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a request; it takes part in the next step that has room."""
        self.stats.submitted(job.request)
        self._command("add", job)

    def cancel(self, request_id: int, error: TandemError | None = None) -> None:
        """Ends a request before the next step. With an error that is reported, else silently."""
        self._command("cancel", (request_id, error))

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs something in the step thread between two steps."""
        future: Future[Any] = Future()
        self._calls.append((work, future))
        self._wake.set()
        return future

    def stop(self, timeout: float | None = None) -> bool:
        """Ends the thread after the step that runs. False if it did not end in time."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _command(self, kind: str, value: Any) -> None:
        self._commands.append((kind, value))
        self._wake.set()

    # The thread

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            if not self.step():
                self._idle()
        for _work, future in self._calls:
            future.cancel()
        self._speculation.close()

    def _idle(self) -> None:
        """Waits for work. The books are verified when it turns idle."""
        if self._commands or self._calls:
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
        if self.scheduler.has_work:
            # The scheduler always finds something to do for the first in order; should it not, do not sleep on it.
            timeout = min(timeout or _RETRY_S, _RETRY_S)
        self._wake.wait(timeout)

    def step(self) -> bool:
        """One turn: take commands, plan, compute, commit, report. False if there was nothing to compute."""
        now = self._clock()
        self._take_commands()
        for request in self.scheduler.expire(now):
            self._drop(
                request, TandemError("DEADLINE", f"the request's deadline passed after {now - request.arrival:.3f} s")
            )
        drafts = self._ask_drafts()
        plan = self.scheduler.plan({sequence: draft.ids for sequence, draft in drafts.items()})
        if plan.entries:
            self.stats.step_begins()
            self.stats.snapshot(self.scheduler)
            self._compute(plan, drafts, now)
        self._report()
        return bool(plan.entries)

    def _take_commands(self) -> None:
        while self._commands:
            kind, value = self._commands.popleft()
            if kind == "add":
                self._add(value)
            else:
                request_id, error = value
                request = self.scheduler.cancel(request_id)
                if request is not None:
                    self._drop(request, error)
        if self._calls:
            # One per turn, so that a row of them does not hold up the batch.
            work, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                self.stats.step_begins()
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)
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
        sequence_id = choice.sequence.id
        if sequence_id in self._started:
            self._started.remove(sequence_id)
            self._speculation.finished(sequence_id)
            self.runner.forget(sequence_id)

    # Drafts

    def _ask_drafts(self) -> dict[int, Draft]:
        """Drafts for the choices that will decode, cut at the first stop id and the first token the grammar refuses."""
        decoding = self.scheduler.decoding()
        if not decoding:
            return {}
        for choice in decoding:
            self._announce(choice)
        candidates = [
            SpecCandidate(
                choice.sequence,
                max(0, min(MAX_DRAFTS, choice.max_output - choice.sequence.output_len - 1)),
                choice.sequence.choice in self._jobs[choice.request.id].matchers,
            )
            for choice in decoding
        ]
        drafts = self._speculation.propose(candidates)
        found: dict[int, Draft] = {}
        for choice, candidate in zip(decoding, candidates, strict=True):
            draft = drafts.get(choice.sequence.id)
            if draft is None or not draft.ids:
                continue
            ids = draft.ids[: candidate.max_drafts]
            if any(not 0 <= token < self.runner.spec.vocab_size for token in ids):
                continue
            matcher = self._matcher(choice)
            if matcher is not None:
                ids = ids[: matcher.valid_prefix(ids)]
            if ids:
                cut = draft.distributions[: len(ids)] if draft.distributions is not None else None
                found[choice.sequence.id] = Draft(tuple(ids), draft.proposer, cut)
        return found

    def _matcher(self, choice: Choice) -> GrammarMatcher | None:
        return self._jobs[choice.request.id].matchers.get(choice.sequence.choice)

    # Compute and commit

    def _compute(self, plan: StepPlan, drafts: dict[int, Draft], now: float) -> None:
        for entry in plan.entries:
            self._note_start(entry, now)
        slices = self._slices(plan, drafts)
        try:
            if plan.copies:
                self.runner.copy_blocks(plan.copies)
            outputs = self.runner.execute([s for s in slices if s is not None])
        except Exception as error:
            log.exception("a step failed")
            self.stats.last_error = f"{type(error).__name__}: {error}"
            self.stats.call_ends()
            self._fail_step(plan)
            return
        done = self._clock()
        self.stats.step_ends(plan)
        # Before commit: what an entry samples is told by the tokens that it has not committed yet.
        rows = sum(1 + len(entry.drafts) for entry in plan.entries if entry.samples)
        prefill = sum(entry.count for entry in plan.entries if not (entry.samples and entry.count == 1))
        results = iter(outputs)
        for entry, piece in zip(plan.entries, slices, strict=True):
            self._commit(entry, next(results) if piece is not None else None, drafts, done)
        self._speculation.step_done(rows, prefill, (done - now) * 1000)

    def _note_start(self, entry: Entry, now: float) -> None:
        choice, request = entry.choice, entry.choice.request
        request.steps += 1
        if request.first_step is None:
            request.first_step = now
            self.stats.left_queue(request)
            self.stats.cached_tokens += request.cached_tokens
        self._announce(choice)

    def _announce(self, choice: Choice) -> None:
        """Tells speculation of a sequence before anything else is said of it."""
        if choice.sequence.id not in self._started:
            self._started.add(choice.sequence.id)
            self._speculation.started(choice.sequence, choice.request.salt.decode("utf-8", "replace"))

    def _slices(self, plan: StepPlan, drafts: dict[int, Draft]) -> list[Slice | None]:
        """The runner's orders. None where a grammar failed: that request has ended."""
        slices: list[Slice | None] = []
        for entry in plan.entries:
            piece = entry.to_slice()
            draft = drafts.get(entry.choice.sequence.id)
            if draft is not None and draft.distributions is not None and entry.drafts:
                piece.distributions = draft.distributions[: len(entry.drafts)]
            job = self._jobs.get(entry.choice.request.id)
            matcher = job.matchers.get(entry.choice.sequence.choice) if job else None
            if matcher is not None and entry.samples:
                try:
                    piece.mask = matcher.masks(entry.drafts)
                except TandemError as error:
                    self._fail(entry.choice.request, error)
            slices.append(piece if entry.choice.status is Status.RUNNING else None)
        return slices

    def _fail(self, request: Request, error: TandemError) -> None:
        if self.scheduler.cancel(request.id) is not None:
            self._drop(request, error)

    def _fail_step(self, plan: StepPlan) -> None:
        """Ends the requests of a step that the runner could not do; others go on."""
        for entry in plan.entries:
            self._fail(entry.choice.request, TandemError("INTERNAL", "the engine failed to compute a step"))
            self.scheduler.commit(entry, (), 0, False)

    def _commit(self, entry: Entry, out: SliceOutput | None, drafts: dict[int, Draft], now: float) -> None:
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
        finish = settled.finish
        accepted = min(out.accepted, len(settled.ids))
        self.scheduler.commit(entry, settled.ids, accepted, finish is not None)
        self._account(entry, drafts, settled.ids, accepted, now)
        if settled.ids or finish is not None:
            scores = out.scores[: len(settled.ids)] if out.scores is not None else None
            update = ChoiceUpdate(index, settled.ids, scores, accepted, settled.text, finish)
            self._report_of(request).updates.append(update)
        if finish is not None:
            self._forget(choice)
            if not request.unfinished:
                self._jobs.pop(request.id, None)

    def _add_scores(self, job: Job, entry: Entry, scores: list[TokenScore]) -> None:
        """Keeps the scores of prompt positions that have none yet (a preempted request computes some twice)."""
        choice = entry.choice
        job.prompt_scores.extend(scores[max(0, choice.scored - entry.start) :])
        if len(job.prompt_scores) >= choice.sequence.prompt_len - 1:
            self._report_of(job.request).prompt_scores = job.prompt_scores

    def _account(self, entry: Entry, drafts: dict[int, Draft], ids: list[int], accepted: int, now: float) -> None:
        request, proposed = entry.choice.request, len(entry.drafts)
        if not ids:
            return
        if request.first_token is None:
            request.first_token = now
        request.last_token = now
        draft = drafts.get(entry.choice.sequence.id)
        proposer = draft.proposer if draft is not None and proposed else ""
        request.drafts_proposed += proposed
        request.drafts_accepted += accepted
        if accepted:
            request.accepted_by_proposer[proposer] = request.accepted_by_proposer.get(proposer, 0) + accepted
        self.stats.committed(len(ids), proposed, accepted)
        self._speculation.observe(entry.choice.sequence.id, proposer, proposed, accepted, ids)

    # Reports

    def _report_of(self, request: Request) -> JobReport:
        return self._reports.setdefault(request.id, JobReport(request))

    def _report(self) -> None:
        self.stats.snapshot(self.scheduler)
        changes = self.scheduler.pool.take_changes()
        if self._reports or changes:
            reports, self._reports = list(self._reports.values()), {}
            self._sink(StepReport(reports, changes))


_EXPLAIN = {"NO_ALLOWED_TOKEN": "masks, bans and grammar leave no token to sample"}
