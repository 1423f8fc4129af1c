"""Policies that look at no cache: round robin, least load, consistent hashing with bounded load."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Sequence

from router.load import EngineLoad
from router.policies.base import Candidate, Policy, Query


class RoundRobin(Policy):
    """Each in turn."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = 0

    def rank(self, query: Query, engines: Sequence[EngineLoad], now: float) -> list[Candidate]:
        ordered = sorted(engines, key=lambda engine: engine.name)
        start = self._turn % len(ordered) if ordered else 0
        return [
            Candidate(engine, cost_s=float((position - start) % len(ordered)))
            for position, engine in enumerate(ordered)
        ]

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        self._turn += 1
        return min(candidates, key=lambda candidate: candidate.cost_s)


class LeastLoad(Policy):
    """Fewest requests in the engine, ties at random."""

    name = "least_load"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def rank(self, query: Query, engines: Sequence[EngineLoad], now: float) -> list[Candidate]:
        return [Candidate(engine, cost_s=float(engine.sequences())) for engine in engines]

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        best = min(candidate.cost_s for candidate in candidates)
        return self._rng.choice([candidate for candidate in candidates if candidate.cost_s == best])


class ConsistentHash(Policy):
    """Consistent hashing of the prompt's first blocks, with bounded load.

    Formula: Mirrokni et al., "Consistent Hashing with Bounded Loads" (2016): an engine takes no more than
    (1 + epsilon) times the mean load; a key then walks on along the ring.
    """

    name = "consistent_hash"
    POINTS = 64
    EPSILON = 0.25
    KEY_TOKENS = 1024

    def __init__(self) -> None:
        self._ring: list[tuple[int, str]] = []

    def add(self, engine: EngineLoad) -> None:
        self.remove(engine)
        for point in range(self.POINTS):
            bisect.insort(self._ring, (_point(f"{engine.name}#{point}".encode()), engine.name))

    def remove(self, engine: EngineLoad) -> None:
        self._ring = [entry for entry in self._ring if entry[1] != engine.name]

    def rank(self, query: Query, engines: Sequence[EngineLoad], now: float) -> list[Candidate]:
        by_name = {engine.name: engine for engine in engines}
        order = self._walk(query, engines, by_name)
        mean = (sum(engine.sequences() for engine in engines) + 1) / max(1, len(engines))
        limit = (1 + self.EPSILON) * mean
        result = []
        for position, name in enumerate(order):
            engine = by_name[name]
            over = engine.sequences() + 1 > max(limit, 1)
            result.append(Candidate(engine, cost_s=position + (len(order) + engine.sequences() if over else 0)))
        return result

    def _walk(self, query: Query, engines: Sequence[EngineLoad], by_name: dict[str, EngineLoad]) -> list[str]:
        size = engines[0].block_size if engines else 16
        hashes = query.hashes(size)
        depth = min(len(hashes), max(1, self.KEY_TOKENS // max(1, size)))
        key = hashes[depth - 1] if hashes else query.request_id.encode()
        start = bisect.bisect_left(self._ring, (_point(key), ""))
        order: dict[str, None] = {}
        for step in range(len(self._ring)):
            name = self._ring[(start + step) % len(self._ring)][1]
            if name in by_name:
                order.setdefault(name)
                if len(order) == len(by_name):
                    break
        for name in by_name:
            order.setdefault(name)
        return list(order)

    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        return min(candidates, key=lambda candidate: candidate.cost_s)


def _point(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
