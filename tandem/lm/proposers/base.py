"""What every proposer shares: the sequence it sees, the guess it makes and the interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_DRAFTS = 32

# (ids, probabilities) of one draft position; sparse, sums to 1.
Distribution = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """What the engine's sampler uses for this sequence; a model proposer draws with the same noise."""

    seed: int = 0
    choice: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    want_distribution: bool = False


@dataclass(slots=True, eq=False)
class DraftSequence:
    """Committed tokens of one request × choice, as the draft knows them. Proposers keep their part in `state`."""

    id: int
    tokens: list[int]
    prompt_len: int = 0
    salt: str = ""
    sampling: DraftSampling = field(default_factory=DraftSampling)
    # Proposers allowed, by name; empty: all.
    allowed: tuple[str, ...] = ()
    # Not to be learnt from when it has ended.
    no_store: bool = False
    state: dict[str, Any] = field(default_factory=dict)

    def allows(self, proposer: str) -> bool:
        return not self.allowed or proposer in self.allowed


@dataclass(frozen=True, slots=True)
class Guess:
    """Drafts that follow the committed tokens; no ids: nothing to say."""

    ids: tuple[int, ...] = ()
    proposer: str = ""
    # Probability that ids[0] is right, 0 to 1; 0: unknown.
    confidence: float = 0.0
    # Tokens of context that agreed with where the guess was copied from; a model's guess has 0.
    match: int = 0
    # One per id, if the sequence wants them.
    distributions: tuple[Distribution, ...] | None = None


NOTHING = Guess()


class Proposer(Protocol):
    """Guesses what follows. One thread calls it. It may raise only on a bug: callers drop the sequence then."""

    name: str

    def start(self, sequence: DraftSequence) -> None:
        """A sequence begins; its tokens, if any, come through `extend`."""
        ...

    def extend(self, sequence: DraftSequence, start: int) -> None:
        """sequence.tokens[start:] are new. Costs O(new tokens)."""
        ...

    def propose(self, wants: list[tuple[DraftSequence, int]]) -> list[Guess]:
        """Guesses, parallel to `wants` (sequence, most ids wanted)."""
        ...

    def finish(self, sequence: DraftSequence, completed: bool) -> None:
        """The sequence ends; a completed one may be learnt from."""
        ...

    def close(self) -> None:
        """Frees what the proposer holds."""
        ...


def periodic(tokens: list[int], start: int, count: int) -> tuple[int, ...]:
    """`count` ids copied from tokens[start:]; past the end it goes on with its own copy, as a loop would."""
    available = len(tokens) - start
    if available >= count:
        return tuple(tokens[start : start + count])
    ids = tokens[start:]
    for index in range(available, count):
        ids.append(ids[index - available])
    return tuple(ids)
