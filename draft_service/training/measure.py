"""Held-out acceptance: what a draft would have got right in answers that it never saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

DraftFunction = Callable[[Sequence[int], int], Sequence[int]]


@dataclass(slots=True)
class Acceptance:
    """Drafting at every answer position, as keep-while-equal would have it."""

    positions: int = 0
    # Positions at which anything was proposed.
    proposed: int = 0
    # reached[i]: times that draft i was proposed and all before it were right; right[i]: times that it was right too.
    reached: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def by_position(self) -> list[float]:
        """Chance of each draft, given those before it."""
        return [round(r / n, 4) if n else 0.0 for r, n in zip(self.right, self.reached, strict=True)]

    @property
    def length(self) -> float:
        """Mean tokens per step: the sampled one and the right drafts, over all positions."""
        return 1 + sum(self.right) / self.positions if self.positions else 1.0


def measure(answers: Sequence[tuple[Sequence[int], int]], draft: DraftFunction, most: int = 5) -> Acceptance:
    """Counts right drafts at every answer position of (ids, index of the first answer token)."""
    found = Acceptance(reached=[0] * most, right=[0] * most)
    for ids, first in answers:
        for place in range(first, len(ids)):
            found.positions += 1
            guess = draft(ids[:place], most)
            found.proposed += bool(guess)
            for index, (mine, theirs) in enumerate(zip(guess, ids[place : place + most], strict=False)):
                found.reached[index] += 1
                if mine != theirs:
                    break
                found.right[index] += 1
    return found
