"""How many routers there are, as far as it matters: what all of them send for each request that this one sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from router.load import EngineLoad


class Herd:
    """Compares this router's prompt tokens with what the engines say they took from everybody.

    Routers that see the same reports judge alike, and what the others have sent since the last report nobody knows. A
    policy needs two numbers for that: `size`, the tokens of all routers for each one of this router's, and
    `unseen_tokens`, what an engine has probably got from the others since its report.
    """

    # Old traffic counts less by this time constant, seconds.
    MEMORY_S = 30.0
    EVERY_S = 0.25
    MAX_SIZE = 32

    def __init__(self) -> None:
        self.size = 1
        self.unseen_tokens = 0.0
        self._own = self._all = 0.0
        self._counted: dict[int, tuple[int, int]] = {}
        self._at = float("-inf")

    def update(self, engines: Sequence[EngineLoad], now: float) -> None:
        """Looks at the engines' counters; at most every `EVERY_S` seconds."""
        passed = now - self._at
        if passed < self.EVERY_S or not engines:
            return
        keep = math.exp(-passed / self.MEMORY_S)
        self._at = now
        own, total = self._own * keep, self._all * keep
        counted: dict[int, tuple[int, int]] = {}
        for engine in engines:
            before = self._counted.get(id(engine), (engine.own_tokens, engine.all_tokens))
            own += engine.own_tokens - before[0]
            total += engine.all_tokens - before[1]
            counted[id(engine)] = (engine.own_tokens, engine.all_tokens)
        self._counted.update(counted)
        self._own, self._all = own, total
        self.size = min(self.MAX_SIZE, max(1, round(total / own))) if own > 0 else self.size
        mean = sum(engine.sent_tokens for engine in engines) / len(engines)
        self.unseen_tokens = (self.size - 1) * mean
