"""Outlier detection: an engine that fails again and again rests, then proves itself with one request."""

from __future__ import annotations

import random

MAX_REST_S = 30.0


class Outlier:
    """Failures in a row of one engine. Times are monotonic seconds."""

    def __init__(self, limit: int, first_rest_s: float) -> None:
        """limit: failures in a row that make it suspect."""
        self._limit = limit
        self._first_rest_s = first_rest_s
        self._rest_s = first_rest_s
        self._rest_until = 0.0
        self._probing = False
        self.failures = 0

    @property
    def suspect(self) -> bool:
        """Whether it gets no work but probes."""
        return self.failures >= self._limit

    def may_probe(self, now: float) -> bool:
        """Whether its rest is over and no probe runs."""
        return now >= self._rest_until and not self._probing

    def probe(self) -> None:
        """A request is sent to see how it fares."""
        self._probing = True

    def succeeded(self) -> None:
        self.failures, self._probing, self._rest_s = 0, False, self._first_rest_s

    def failed(self, now: float) -> None:
        """One more; at the limit it rests, twice as long each time."""
        self.failures += 1
        if self.suspect:
            self._rest_until = now + self._rest_s * random.uniform(0.9, 1.1)
            self._rest_s = min(2 * self._rest_s, MAX_REST_S)
        self._probing = False

    def condemn(self, now: float) -> None:
        """A failure that makes it suspect at once."""
        self.failures = max(self.failures, self._limit - 1)
        self.failed(now)

    def ended(self) -> None:
        """A request ended without saying anything about the engine."""
        self._probing = False

    def reset(self) -> None:
        """It is a new process."""
        self.succeeded()
        self._rest_until = 0.0
