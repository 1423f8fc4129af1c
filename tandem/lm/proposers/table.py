"""A trained n-gram table: for a few last tokens, the likeliest next one in the target's own answers.

Reading one draft touches a handful of cache lines, so it costs microseconds and no memory bandwidth. The table is made
by `tandem draft train`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tandem.lm.proposers.base import NOTHING, DraftSequence, Guess

FORMAT = 1
_MASK = (1 << 64) - 1
_PRIME = 0x9E37_79B9_7F4A_7C15
# A chain of drafts less likely than this to be right as a whole is not made longer.
_MIN_CHAIN = 0.12
# Taken off every count, for what was seen by chance.
_DISCOUNT = 0.6


class TableError(ValueError):
    """A table file that cannot be used: says what is wrong with it."""


def context_key(tokens: Sequence[int]) -> int:
    """64-bit key of a context: a multiply-and-mix over its ids, oldest first."""
    state = (len(tokens) * 0xD6E8_FEB8_6659_FD93) & _MASK
    for token in tokens:
        state = ((state ^ (token + 1)) * _PRIME) & _MASK
        state ^= state >> 29
    return state


@dataclass(frozen=True, slots=True)
class Level:
    """All contexts of one length: keys (uint64, ascending), next ids (uint32), their chances in 255ths (uint8)."""

    order: int
    keys: np.ndarray
    ids: np.ndarray
    chances: np.ndarray

    def find(self, key: int) -> tuple[int, float] | None:
        place = int(self.keys.searchsorted(np.uint64(key)))
        if place < len(self.keys) and int(self.keys[place]) == key:
            return int(self.ids[place]), int(self.chances[place]) / 255
        return None


class TableProposer:
    """Backs off from the longest context to the shortest."""

    name = "table"

    def __init__(self, levels: Sequence[Level], max_drafts: int = 8) -> None:
        """levels: one per order. Raises TableError if there is none or two have one order."""
        orders = [level.order for level in levels]
        if not orders or len(set(orders)) != len(orders):
            raise TableError(f"orders are {orders}, but at least one is needed, each once")
        self._levels = sorted(levels, key=lambda level: -level.order)
        self._max_drafts = max_drafts

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for level in self._levels for array in (level.keys, level.ids, level.chances))

    def next(self, tokens: Sequence[int]) -> tuple[int, float, int] | None:
        """The likeliest id after `tokens`, its chance, and the length of the context that said so."""
        for level in self._levels:
            if len(tokens) >= level.order:
                found = level.find(context_key(tokens[len(tokens) - level.order :]))
                if found is not None:
                    return (*found, level.order)
        return None

    def draft(self, tokens: Sequence[int], count: int) -> Guess:
        """Up to `count` ids that follow `tokens`."""
        context = list(tokens[-self._levels[0].order :])
        ids: list[int] = []
        first, match, chain = 0.0, 0, 1.0
        while len(ids) < min(count, self._max_drafts):
            found = self.next(context)
            if found is None:
                break
            token, chance, order = found
            chain *= chance
            if ids and chain < _MIN_CHAIN:
                break
            if not ids:
                first, match = chance, order
            ids.append(token)
            context = [*context[1:], token] if len(context) >= self._levels[0].order else [*context, token]
        return Guess(tuple(ids), self.name, first, match) if ids else NOTHING

    def start(self, sequence: DraftSequence) -> None:
        return

    def extend(self, sequence: DraftSequence, start: int) -> None:
        return

    def propose(self, wants: list[tuple[DraftSequence, int]]) -> list[Guess]:
        return [self.draft(sequence.tokens, count) for sequence, count in wants]

    def finish(self, sequence: DraftSequence, completed: bool) -> None:
        return

    def close(self) -> None:
        return

    def save(self, path: Path) -> None:
        """Writes an .npz file; another process never sees half of it."""
        arrays: dict[str, np.ndarray] = {
            "format": np.array(FORMAT),
            "orders": np.array([e.order for e in self._levels]),
        }
        for level in self._levels:
            arrays |= {
                f"keys{level.order}": level.keys,
                f"ids{level.order}": level.ids,
                f"chances{level.order}": level.chances,
            }
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(partial, **arrays)  # type: ignore[arg-type]
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> TableProposer:
        """Raises TableError if the file is missing or no such table."""
        try:
            with np.load(path, allow_pickle=False) as data:
                if int(data["format"]) != FORMAT:
                    raise TableError(f"format is {int(data['format'])}, but this version reads {FORMAT}")
                levels = [_level(data, int(order)) for order in data["orders"]]
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise error if isinstance(error, TableError) else TableError(f"cannot be read: {error}") from error
        return cls(levels)


def _level(data: np.lib.npyio.NpzFile, order: int) -> Level:
    level = Level(order, data[f"keys{order}"], data[f"ids{order}"], data[f"chances{order}"])
    kinds = (level.keys.dtype, level.ids.dtype, level.chances.dtype)
    if kinds != (np.uint64, np.uint32, np.uint8) or not len(level.keys) == len(level.ids) == len(level.chances):
        raise TableError(f"order {order} has arrays of {kinds} and unequal lengths or kinds")
    if not (level.keys[1:] > level.keys[:-1]).all():
        raise TableError(f"keys of order {order} are not ascending")
    return level


def build(answers: Sequence[tuple[Sequence[int], int]], orders: Sequence[int], max_bytes: int) -> TableProposer:
    """Counts continuations in (ids, index of the first answer token) and keeps the contexts that are worth most.

    A context is worth the right drafts that it should give beyond what the next shorter one gives. 13 bytes each.
    """
    counts: dict[int, dict[tuple[int, ...], dict[int, int]]] = {order: {} for order in orders}
    for ids, first in answers:
        for order in orders:
            table = counts[order]
            for place in range(max(first, order), len(ids)):
                following = table.setdefault(tuple(ids[place - order : place]), {})
                following[ids[place]] = following.get(ids[place], 0) + 1
    rows: list[tuple[float, int, int, int, int]] = []
    best: dict[tuple[int, ...], tuple[int, float]] = {}
    for order in sorted(orders):
        for context, following in counts[order].items():
            token, hits = max(following.items(), key=lambda item: (item[1], -item[0]))
            total = sum(following.values())
            nothing = (-1, 0.0)
            known, trust = next((best[context[-n:]] for n in range(order - 1, 0, -1) if context[-n:] in best), nothing)
            # Held-out chance of a count: absolute discounting (Ney et al., 1994).
            chance = (hits - _DISCOUNT) / total
            worth = total * (0.1 * abs(chance - trust) if known == token else chance - trust)
            if worth > 0:
                best[context] = (token, chance)
                rows.append((worth, order, context_key(context), token, round(255 * chance)))
    rows.sort(reverse=True)
    return TableProposer([_pack(rows[: max_bytes // 13], order) for order in orders])


def _pack(rows: list[tuple[float, int, int, int, int]], order: int) -> Level:
    chosen = sorted((key, token, chance) for _, of, key, token, chance in rows if of == order)
    # Two contexts of one key (never seen in practice): the first stays.
    unique = [row for place, row in enumerate(chosen) if place == 0 or chosen[place - 1][0] != row[0]]
    return Level(
        order,
        np.array([key for key, _, _ in unique], np.uint64),
        np.array([token for _, token, _ in unique], np.uint32),
        np.array([chance for _, _, chance in unique], np.uint8),
    )
