"""Speculation as the step loop sees it: an object that is asked for drafts before each step and told what came of it.

The loop calls it from one thread (the step thread). Nothing here may raise or block beyond its own short deadline:
a draft that is late, wrong or dead costs speed, never a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tandem.lm.types import Sequence

# Most drafts per sequence and step; equals the limit of the draft contract.
MAX_DRAFTS = 32


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens guessed to follow sequence.token_ids, and who guessed them."""

    ids: tuple[int, ...]
    proposer: str
    # One (ids, probabilities) per draft: verify by rejection. None: keep while equal.
    distributions: tuple[tuple[np.ndarray, np.ndarray], ...] | None = None


@dataclass(frozen=True, slots=True)
class SpecCandidate:
    """A sequence that will decode in the coming step, and how many drafts it could use at most (may be 0)."""

    sequence: Sequence
    max_drafts: int
    # A grammar rules the output; drafts that it refuses are cut.
    constrained: bool


class SpeculationController(Protocol):
    """Where drafts come from. All calls come from the step thread."""

    def propose(self, candidates: list[SpecCandidate]) -> dict[int, Draft]:
        """Drafts by sequence id for the coming step. Returns quickly and never raises."""
        ...

    def observe(self, sequence_id: int, proposer: str, proposed: int, accepted: int, committed_ids: list[int]) -> None:
        """What a step committed for a sequence. proposer is "" and proposed 0 if it ran without drafts."""
        ...

    def wants_hidden(self) -> bool:
        """Whether the coming step should give hidden states of what it samples."""
        ...

    def keep_hidden(self, sequence_id: int, hidden: np.ndarray) -> None:
        """After `observe`: the state, fp32 [hidden_size], whose logits gave the sequence's last token."""
        ...

    def started(self, sequence: Sequence, salt: str) -> None:
        """A sequence was admitted. The controller may read sequence.token_ids later; it may not change it."""
        ...

    def finished(self, sequence_id: int) -> None:
        """A sequence is gone, for whatever reason."""
        ...

    def step_done(self, batch_rows: int, prefill_tokens: int, step_ms: float) -> None:
        """Cost of a step: sampled rows (drafts included), prefill tokens, duration in milliseconds."""
        ...

    def idle(self) -> bool:
        """Nothing is to be computed: what is still unsaid is said now. True if it could not be; then call again."""
        ...

    def close(self) -> None:
        """Frees connections and threads."""
        ...


class NullSpeculation:
    """No drafts at all."""

    def propose(self, candidates: list[SpecCandidate]) -> dict[int, Draft]:
        return {}

    def observe(self, sequence_id: int, proposer: str, proposed: int, accepted: int, committed_ids: list[int]) -> None:
        pass

    def wants_hidden(self) -> bool:
        return False

    def keep_hidden(self, sequence_id: int, hidden: np.ndarray) -> None:
        pass

    def started(self, sequence: Sequence, salt: str) -> None:
        pass

    def finished(self, sequence_id: int) -> None:
        pass

    def step_done(self, batch_rows: int, prefill_tokens: int, step_ms: float) -> None:
        pass

    def idle(self) -> bool:
        return False

    def close(self) -> None:
        pass
