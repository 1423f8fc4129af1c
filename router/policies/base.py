"""The interface of a routing policy. The same code runs in the router and in the simulator: time is an argument."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.load import EngineLoad


@dataclass
class Query:
    """What a policy may know of a request. Block hashes are made on demand, once per block size."""

    request_id: str
    prompt_tokens: int
    max_tokens: int = 0
    hasher: Callable[[int], list[bytes]] | None = None
    _hashes: dict[int, list[bytes]] = field(default_factory=dict)

    def hashes(self, block_size: int) -> list[bytes]:
        """Hashes of the prompt's full blocks; empty for a text prompt."""
        if self.hasher is None or block_size <= 0:
            return []
        found = self._hashes.get(block_size)
        if found is None:
            found = self._hashes[block_size] = self.hasher(block_size)
        return found


@dataclass(slots=True)
class Candidate:
    """One engine as the policy sees it for one request. Lower `cost_s` is better."""

    engine: EngineLoad
    matched_blocks: int = 0
    predicted_s: float = 0.0
    cost_s: float = 0.0
    # Parts of the cost, seconds, in the order of `part_names`.
    part_values: tuple[float, ...] = ()
    part_names: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, float]:
        """Parts of the cost by name, seconds."""
        return dict(zip(self.part_names, self.part_values, strict=True))


class Policy(ABC):
    """Chooses engines. Six methods; only `rank` and `choose` must be written."""

    name = ""

    def add(self, engine: EngineLoad) -> None:  # noqa: B027
        """An engine joined the fleet (or restarted with an empty cache)."""

    def remove(self, engine: EngineLoad) -> None:  # noqa: B027
        """An engine left the fleet, or lost its cache."""

    @abstractmethod
    def rank(self, query: Query, engines: Sequence[EngineLoad], now: float) -> list[Candidate]:
        """Judges every engine; for choosing and for explaining. Changes nothing."""

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], query: Query) -> Candidate:
        """Takes one of the ranked candidates. `candidates` is never empty."""

    def sent(self, query: Query, chosen: Candidate, now: float) -> None:  # noqa: B027
        """The request went there."""

    def answered(self, query: Query, chosen: Candidate, cached_tokens: int, ttft_s: float) -> None:  # noqa: B027
        """The engine told how much was cached (tokens), and the first token came after `ttft_s` seconds."""
