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

    def summary(self) -> dict[str, Any]:
        """The counts of a log line; accepted by position as a share of the drafts verified there."""
        places = [index for index, count in enumerate(self.proposed_at) if count]
        return {
            "proposed": self.proposed,
            "accepted": self.accepted,
            "acceptance_length": round(self.acceptance_length, 2),
            "accepted_by_position": [round(self.accepted_at[index] / self.proposed_at[index], 2) for index in places],
        }


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
        """Plain numbers for JSON."""
        return asdict(self)

    def summary(self) -> dict[str, Any]:
        """What a log line has room for: per proposer drafts, acceptance length and accepted share by position; latency
        of the service's answers and of a call of the head in milliseconds; missed deadlines."""
        client, head = self.client, self.head
        return {
            "proposers": {name: entry.summary() for name, entry in sorted(self.proposers.items())},
            "questions": client.questions,
            "answer_ms": round(client.latency_us_sum / 1e3 / max(1, client.answers), 2),
            "deadline_misses": client.misses,
            "head_ms": round(head.spent_us / 1e3 / max(1, head.calls), 2),
        }
