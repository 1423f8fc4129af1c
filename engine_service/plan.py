"""What one step does: the scheduler's answer, and the step loop's orders to the runner. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_service.requests import Choice
from tandem.lm.types import Slice


@dataclass(slots=True, eq=False)
class Entry:
    """A choice's part of a step."""

    choice: Choice
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    # Block copies to be made before the step, and references that keep the sources until it ends.
    copies: list[tuple[int, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.count + len(self.drafts)

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.choice.sequence.token_ids)

    @property
    def decodes(self) -> bool:
        """It owes one token, and samples the next."""
        return self.count == 1 and self.samples

    def to_slice(self) -> Slice:
        return Slice(
            sequence=self.choice.sequence,
            block_table=list(self.choice.blocks),
            start=self.start,
            count=self.count,
            drafts=self.drafts,
            sample=self.samples,
            score_prompt=self.choice.wants_scores,
        )


@dataclass(slots=True)
class StepPlan:
    """What a step does. Entries are in policy order, decodes first."""

    entries: list[Entry]
    preempted: list[Choice]

    @property
    def copies(self) -> list[tuple[int, int]]:
        return [pair for entry in self.entries for pair in entry.copies]

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.entries)

    # Before the step is committed: what an entry samples is told by the tokens that it has not committed yet.

    @property
    def sampled_rows(self) -> int:
        """Rows that are sampled, drafts included."""
        return sum(1 + len(entry.drafts) for entry in self.entries if entry.samples)

    @property
    def prefill_tokens(self) -> int:
        return sum(entry.count for entry in self.entries if not entry.decodes)
