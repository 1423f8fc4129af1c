"""Prompt lookup: the last n tokens occurred before; propose what followed them then (Saxena, 2023)."""

from __future__ import annotations

from tandem.lm.proposers.base import NOTHING, DraftSequence, Guess, periodic

# Key of an n-gram: its tokens. Value: index of the token after its latest occurrence.
_Index = dict[tuple[int, ...], int]


class NgramProposer:
    """Looks up the longest of a few n-gram lengths. Updates cost one dictionary store per token and length."""

    name = "ngram"

    def __init__(self, lengths: tuple[int, ...] = (6, 4, 3, 2)) -> None:
        """lengths: n-gram lengths; the longest is tried first. Raises ValueError if none or one below 1 is given."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"n-gram lengths are {lengths}, but at least one is needed and each is at least 1")
        self._lengths = tuple(sorted(set(lengths), reverse=True))

    def start(self, sequence: DraftSequence) -> None:
        sequence.state[self.name] = {length: {} for length in self._lengths}

    def extend(self, sequence: DraftSequence, start: int) -> None:
        tokens = sequence.tokens
        # An n-gram enters when the token after it is known, so the newest n-gram never finds itself.
        for length, index in sequence.state[self.name].items():
            for end in range(max(start, length), len(tokens)):
                index[tuple(tokens[end - length : end])] = end

    def propose(self, wants: list[tuple[DraftSequence, int]]) -> list[Guess]:
        return [self._one(sequence, count) for sequence, count in wants]

    def _one(self, sequence: DraftSequence, count: int) -> Guess:
        tokens = sequence.tokens
        indexes: dict[int, _Index] = sequence.state[self.name]
        for length in self._lengths:
            if len(tokens) < length:
                continue
            start = indexes[length].get(tuple(tokens[-length:]))
            if start is not None:
                return Guess(periodic(tokens, start, count), self.name, match=length)
        return NOTHING

    def finish(self, sequence: DraftSequence, completed: bool) -> None:
        sequence.state.pop(self.name, None)

    def close(self) -> None:
        return
