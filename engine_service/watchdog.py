"""Tells when a step hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine_service.stats import LoopStats

TICK_S = 0.25
# What one look may add to a step's time, in ticks.
_MOST_TICKS = 2


class Watchdog:
    """Looks at the step loop every TICK_S from another thread.

    A step hangs when it has run for more than the stall limit, and for three times the longest step that ended. Only
    time in which the watchdog itself came round counts: while the whole process stood still (stopped, suspended with
    its machine, starved of cores) the step could not go on, and nobody would be helped by failing its requests.
    """

    def __init__(self, stats: LoopStats, stall_limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._stall_limit_s = stall_limit_s
        self._clock = clock
        self._looked = clock()
        # When the step began that is being watched, how long it ran under watch, and the longest of those before it.
        self._step: float | None = None
        self._ran_s = 0.0
        self._longest_s = 0.0

    @property
    def limit_s(self) -> float:
        return max(self._stall_limit_s, 3 * self._longest_s)

    def look(self) -> bool:
        """True while a step hangs. Call it every TICK_S."""
        now, step = self._clock(), self._stats.step_started
        passed = min(now - self._looked, _MOST_TICKS * TICK_S)
        self._looked = now
        if step != self._step:
            self._longest_s = max(self._longest_s, self._ran_s)
            self._step, self._ran_s = step, 0.0
        if step is None:
            return False
        self._ran_s += min(passed, now - step)
        return self._ran_s > self.limit_s
