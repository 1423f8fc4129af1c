"""Counters of speculation, for receipts, Prometheus and logs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from engine_service.speculation import MAX_DRAFTS
from engine_service.speculation.client import ClientStats


@dataclass(slots=True)
class ProposerStats:
    """What became of one proposer's drafts in verification."""

    drafts: int = 0
    proposed: int = 0
    accepted: int = 0
    # accepted_at[i]: times that draft i (from 0) was kept; proposed_at[i]: times that it was verified.
    proposed_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)

    def add(self, proposed: int, accepted: int) -> None:
        self.drafts += 1
        self.proposed += proposed
        self.accepted += accepted
        for index in range(min(proposed, MAX_DRAFTS)):
            self.proposed_at[index] += 1
            self.accepted_at[index] += index < accepted

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per verified draft, the sampled one included."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0


@dataclass(slots=True)
class HeadStats:
    """What the head has done: calls (one per step that drafts with it), drafted tokens, time."""

    calls: int = 0
    drafted: int = 0
    spent_us: float = 0.0


@dataclass(slots=True)
class SpeculationStats:
    """Since the start of the engine."""

    client: ClientStats
    head: HeadStats = field(default_factory=HeadStats)
    proposers: dict[str, ProposerStats] = field(default_factory=dict)
    # Steps for which drafts were sought, and those that ran with at least one.
    steps: int = 0
    steps_with_drafts: int = 0
    # Time that planning waited for answers, microseconds.
    waited_us: float = 0.0
    resyncs: int = 0
    bad: int = 0
    # Proposals that no longer fitted what had been committed.
    stale: int = 0
    # Errors of our own that were swallowed: each is a bug.
    errors: int = 0

    def proposer(self, name: str) -> ProposerStats:
        return self.proposers.setdefault(name, ProposerStats())

    @property
    def proposed(self) -> int:
        return sum(entry.proposed for entry in self.proposers.values())

    @property
    def accepted(self) -> int:
        return sum(entry.accepted for entry in self.proposers.values())

    def snapshot(self) -> dict[str, Any]:
        """Plain numbers for logs and JSON."""
        return asdict(self)
