"""Suffix proposer: the longest match in the request itself, or in what earlier requests of the same salt produced.

The idea of copying from past outputs by longest suffix, most frequent continuation first, is SuffixDecoding's
(Oliaro et al., 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tandem.lm.proposers.automaton import ROOT, SuffixAutomaton
from tandem.lm.proposers.base import NOTHING, DraftSequence, Guess, periodic
from tandem.lm.proposers.suffix_file import SuffixFile

# Prompt tokens that are learnt with an output, so that its first tokens have a context.
_CONTEXT = 8
# A chain of continuations is cut where it is less likely than this to be reached.
_MIN_CHAIN = 0.15


@dataclass(slots=True)
class _Cursor:
    """Where a sequence stands in one automaton."""

    automaton: SuffixAutomaton
    state: int = ROOT
    matched: int = 0


@dataclass(slots=True)
class _Local:
    """The request's own automaton; `last` is the state of its whole text."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    last: int = ROOT
    size: int = 0
    cursors: list[_Cursor] = field(default_factory=list)


@dataclass(slots=True)
class _Store:
    """Two generations of past outputs: when the young one is full it becomes the old one, and the old one goes."""

    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton | None = None
    young_tokens: int = 0
    old_tokens: int = 0


class SuffixProposer:
    """Holds at most `max_store_tokens` of past output over all salts, `max_salts` salts (least recently used goes)."""

    name = "suffix"

    def __init__(
        self,
        min_match: int = 2,
        max_local_tokens: int = 16_384,
        max_store_tokens: int = 200_000,
        max_salts: int = 64,
        store: SuffixFile | None = None,
    ) -> None:
        """min_match: tokens of context that must agree. max_local_tokens: longer sequences get no automaton of their
        own. max_store_tokens: 0 learns nothing. store: where outputs are kept between runs; None: in memory only.

        Raises:
            OSError: the store cannot be read. ValueError: it is none.
        """
        self._min_match = min_match
        self._max_local = max_local_tokens
        self._max_store = max_store_tokens
        self._max_salts = max_salts
        self._stores: OrderedDict[str, _Store] = OrderedDict()
        self._file = store
        for salt, tokens in store.read() if store is not None else ():
            self.learn(salt, tokens)

    @property
    def stored_tokens(self) -> int:
        """Tokens of past output that are held now."""
        return sum(store.young_tokens + store.old_tokens for store in self._stores.values())

    def start(self, sequence: DraftSequence) -> None:
        local = _Local()
        store = self._stores.get(sequence.salt)
        if store is not None:
            self._stores.move_to_end(sequence.salt)
            local.cursors = [_Cursor(store.young)] + ([_Cursor(store.old)] if store.old else [])
        sequence.state[self.name] = local

    def extend(self, sequence: DraftSequence, start: int) -> None:
        local: _Local = sequence.state[self.name]
        automaton = local.automaton
        for index in range(start, len(sequence.tokens)):
            token = sequence.tokens[index]
            if local.size < self._max_local:
                # What the text ended with until now has an occurrence that is older than the newest token.
                automaton.touch_path(automaton.link[local.last], index)
                local.last = automaton.extend(local.last, token, index + 1)
                local.size += 1
            for cursor in local.cursors:
                cursor.state, cursor.matched = cursor.automaton.advance(cursor.state, cursor.matched, token)

    def propose(self, wants: list[tuple[DraftSequence, int]]) -> list[Guess]:
        return [self._one(sequence, count) for sequence, count in wants]

    def _one(self, sequence: DraftSequence, count: int) -> Guess:
        local: _Local = sequence.state[self.name]
        best = self._own(sequence, local, count)
        for cursor in local.cursors:
            if cursor.matched > best.match and cursor.matched >= self._min_match:
                ids, confidence = _likeliest(cursor.automaton, cursor.state, count)
                if ids:
                    best = Guess(ids, self.name, confidence, match=cursor.matched)
        return best

    def _own(self, sequence: DraftSequence, local: _Local, count: int) -> Guess:
        if local.size < len(sequence.tokens):
            return NOTHING
        state = local.automaton.link[local.last]
        if state <= ROOT or local.automaton.length[state] < self._min_match:
            return NOTHING
        matched = local.automaton.length[state]
        return Guess(periodic(sequence.tokens, local.automaton.end[state], count), self.name, match=matched)

    def finish(self, sequence: DraftSequence, completed: bool) -> None:
        sequence.state.pop(self.name, None)
        output = sequence.tokens[max(0, sequence.prompt_len - _CONTEXT) :]
        if completed and self._max_store and len(sequence.tokens) - sequence.prompt_len > self._min_match:
            self.learn(sequence.salt, output)
            if self._file is not None:
                self._file.add(sequence.salt, output)

    def learn(self, salt: str, tokens: list[int]) -> None:
        """Adds one finished output to the store of `salt`, and forgets the oldest if it is too much."""
        half = max(1, self._max_store // 2)
        tokens = tokens[:half]
        store = self._stores.setdefault(salt, _Store())
        self._stores.move_to_end(salt)
        if store.young_tokens + len(tokens) > half:
            store.old, store.old_tokens = store.young, store.young_tokens
            store.young, store.young_tokens = SuffixAutomaton(), 0
        store.young.add(tokens)
        store.young_tokens += len(tokens)
        while len(self._stores) > 1 and (len(self._stores) > self._max_salts or self.stored_tokens > self._max_store):
            self._stores.popitem(last=False)

    def close(self) -> None:
        """Raises OSError if the store cannot be written."""
        if self._file is not None:
            self._file.write()
        self._stores.clear()


def _likeliest(automaton: SuffixAutomaton, state: int, count: int) -> tuple[tuple[int, ...], float]:
    """Follows the most frequent continuation; returns the ids and the first one's share of what followed."""
    ids: list[int] = []
    first = chain = 0.0
    share = 1.0
    while len(ids) < count:
        following = automaton.next[state]
        if not following:
            break
        total = sum(automaton.count[target] for target in following.values())
        token, target = max(following.items(), key=lambda item: automaton.count[item[1]])
        share = automaton.count[target] / total if total else 0.0
        chain = share if not ids else chain * share
        if ids and chain < _MIN_CHAIN:
            break
        first = first or share
        ids.append(token)
        state = target
    return tuple(ids), first
