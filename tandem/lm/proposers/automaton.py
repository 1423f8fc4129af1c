"""Suffix automaton, grown online: the smallest automaton of all substrings of one or more token sequences.

Construction after Blumer et al. (1985), in the generalised form that restarts at the root for each new sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

ROOT = 0
# Suffix links followed when positions or counts are passed on: long runs of one token have chains as long as the run.
_MAX_HOPS = 32


class SuffixAutomaton:
    """States are classes of substrings that end at the same places. Amortised O(1) per token; ≤ 2 states per token."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        # Length of the longest substring of the state.
        self.length: list[int] = [0]
        # Index just after the latest known occurrence that is older than the newest token.
        self.end: list[int] = [0]
        # Occurrences, as far as `count_path` was told.
        self.count: list[int] = [0]

    def __len__(self) -> int:
        return len(self.next)

    def extend(self, last: int, token: int, end: int) -> int:
        """Appends `token` after state `last`; `end` is the index after the token. Returns the new last state."""
        known = self.next[last].get(token)
        if known is not None:
            # Only in a generalised automaton: the whole text so far occurred before.
            if self.length[known] == self.length[last] + 1:
                return known
            return self._clone(last, token, known)
        state = self._new(self.length[last] + 1, end)
        walk = last
        while walk >= 0 and token not in self.next[walk]:
            self.next[walk][token] = state
            walk = self.link[walk]
        if walk < 0:
            self.link[state] = ROOT
        else:
            target = self.next[walk][token]
            exact = self.length[target] == self.length[walk] + 1
            self.link[state] = target if exact else self._clone(walk, token, target)
        return state

    def _new(self, length: int, end: int) -> int:
        self.next.append({})
        self.link.append(ROOT)
        self.length.append(length)
        self.end.append(end)
        self.count.append(0)
        return len(self.next) - 1

    def _clone(self, walk: int, token: int, target: int) -> int:
        clone = self._new(self.length[walk] + 1, self.end[target])
        self.next[clone] = dict(self.next[target])
        self.link[clone] = self.link[target]
        self.count[clone] = self.count[target]
        self.link[target] = clone
        while walk >= 0 and self.next[walk].get(token) == target:
            self.next[walk][token] = clone
            walk = self.link[walk]
        return clone

    def touch_path(self, state: int, end: int) -> None:
        """The suffixes of `state` end at `end` too: remembers it as their latest occurrence."""
        for _ in range(_MAX_HOPS):
            if state <= ROOT:
                return
            self.end[state] = end
            state = self.link[state]

    def count_path(self, state: int) -> None:
        """One more occurrence of `state` and its suffixes."""
        for _ in range(_MAX_HOPS):
            if state <= ROOT:
                return
            self.count[state] += 1
            state = self.link[state]

    def add(self, tokens: Sequence[int]) -> None:
        """Adds a whole sequence and counts its substrings."""
        last = ROOT
        path = []
        for index, token in enumerate(tokens):
            last = self.extend(last, token, index + 1)
            path.append(last)
        for state in path:
            self.count_path(state)

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Longest suffix of (what `state` matched + token) that occurs. Returns its state and its length."""
        while state != ROOT and token not in self.next[state]:
            state = self.link[state]
            matched = self.length[state]
        following = self.next[state].get(token)
        return (following, matched + 1) if following is not None else (ROOT, 0)
