"""Counters of the step loop. Written by the step thread, read by others: single values only, so no lock is needed
except for the queue's length, which both sides change."""

from __future__ import annotations

import threading
import time

from engine_service.plan import StepPlan
from engine_service.requests import Request
from engine_service.scheduler import Scheduler

_SMOOTHING = 0.1


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)


class LoopStats:
    """What load reports and the watchdog read. Times in seconds of time.monotonic or milliseconds as named."""

    def __init__(self) -> None:
        self.steps = 0
        self.step_started: float | None = None
        self.longest_step_ms = 0.0
        self.prefill_tokens_per_s = 0.0
        self.decode_step_ms = 0.0
        self.draft_acceptance = 0.0
        self.output_tokens = 0
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.drafts_proposed = 0
        self.drafts_accepted = 0
        self.preemptions = 0
        self.running = 0
        self.seats = 0
        self.waiting = 0
        self.uncached_waiting_tokens = 0
        self.blocks_used = 0
        self.blocks_cached = 0
        self.last_error = ""
        self._queued: set[int] = set()
        self._lock = threading.Lock()

    # Either thread

    def submitted(self, request: Request) -> None:
        with self._lock:
            self._queued.add(request.id)

    def left_queue(self, request: Request) -> None:
        """The request runs for the first time, or is gone."""
        with self._lock:
            self._queued.discard(request.id)

    @property
    def queued(self) -> int:
        """Requests that were submitted and have not run yet."""
        return len(self._queued)

    @property
    def work_pending(self) -> bool:
        return self.step_started is not None or self.running > 0 or self.queued > 0

    # Step thread

    def step_begins(self) -> None:
        self.step_started = time.monotonic()

    def call_ends(self) -> None:
        self.step_started = None

    def step_ends(self, plan: StepPlan) -> None:
        started, self.step_started = self.step_started, None
        elapsed = time.monotonic() - (started or time.monotonic())
        self.steps += 1
        self.longest_step_ms = max(self.longest_step_ms, elapsed * 1000)
        self.preemptions += len(plan.preempted)
        prefill = plan.prefill_tokens
        decodes = sum(entry.decodes for entry in plan.entries)
        self.prefill_tokens += prefill
        if prefill == 0:
            self.decode_step_ms = _smooth(self.decode_step_ms, elapsed * 1000)
        elif elapsed > 0 and prefill > decodes:
            self.prefill_tokens_per_s = _smooth(self.prefill_tokens_per_s, prefill / elapsed)

    def committed(self, tokens: int, proposed: int, accepted: int) -> None:
        self.output_tokens += tokens
        self.drafts_proposed += proposed
        self.drafts_accepted += accepted
        if proposed:
            self.draft_acceptance = self.draft_acceptance + _SMOOTHING * (accepted / proposed - self.draft_acceptance)

    def snapshot(self, scheduler: Scheduler) -> None:
        pool = scheduler.pool
        self.running = len(scheduler.running)
        self.seats = scheduler.seats_used
        self.waiting = len(scheduler.waiting)
        owed = sum(choice.remaining for choice in scheduler.running if choice.remaining > 1)
        self.uncached_waiting_tokens = owed + sum(choice.remaining for choice in scheduler.waiting)
        self.blocks_used = pool.num_used
        self.blocks_cached = pool.num_cached
