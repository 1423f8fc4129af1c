"""The prefix index: which engine holds which KV block.

One dictionary maps a block hash to a bit mask of engines (bit = slot). A lookup walks the prompt's chain once and keeps
the mask of engines that hold everything so far, so its cost does not grow with the number of engines.

Beside what engines have announced there are *predicted* entries: blocks of prompts that were just routed. They are
short-lived where announcements come, and an LRU of the engine's size where they do not.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

DIGEST_BYTES = 16
MAX_SHARED_MASKS = 65_536


def split_hashes(data: bytes) -> list[bytes]:
    """Cuts concatenated 16-byte hashes.

    Raises:
        ValueError: the length is no multiple of 16.
    """
    if len(data) % DIGEST_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole number of {DIGEST_BYTES}-byte hashes")
    return [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]


class PrefixIndex:
    """Announced blocks of all engines, under a hard cap of (block, engine) pairs.

    At the cap new blocks are not taken up (and counted in `refused`): what is known stays true, and removals make room.
    A slot that is cleared is retired at once and swept later in small slices, so that no call takes long.
    """

    def __init__(self, max_pairs: int) -> None:
        self.max_pairs = max_pairs
        self.pairs = 0
        self.refused = 0
        self._holders: dict[bytes, int] = {}
        self._counts: dict[int, int] = {}
        self._retired = 0
        self._sweep: list[bytes] = []
        self._sweep_mask = 0
        # One int object per set of engines: fresh ones cost 32 bytes and more, and look-ups need only compare objects.
        self._masks: dict[int, int] = {}
        self._bits: list[int] = []

    def __len__(self) -> int:
        return len(self._holders)

    def new_slot(self) -> int:
        """A free bit."""
        slot = 0
        while slot in self._counts or self._retired >> slot & 1:
            slot += 1
        self._counts[slot] = 0
        while len(self._bits) <= slot:
            bit = 1 << len(self._bits)
            self._bits.append(self._masks.setdefault(bit, bit))
        return slot

    def retire(self, slot: int) -> None:
        """Forgets all blocks of a slot; the bit is free again when `sweep` has passed."""
        self._counts.pop(slot)
        self._retired |= 1 << slot

    def count(self, slot: int) -> int:
        """Blocks announced for a slot."""
        return self._counts.get(slot, 0)

    def _shared_masks(self) -> dict[int, int]:
        """The shared objects; begun anew when there are too many, as sets of engines come and go."""
        if len(self._masks) > MAX_SHARED_MASKS:
            self._masks = {bit: bit for bit in self._bits}
        return self._masks

    def stored(self, slot: int, hashes: Iterable[bytes]) -> None:
        """These blocks can now be found at the engine."""
        bit = self._bits[slot]
        holders, shared = self._holders, self._shared_masks()
        room = self.max_pairs - self.pairs
        added = 0
        for key in hashes:
            mask = holders.get(key)
            if mask is None:
                if added >= room:
                    self.refused += 1
                    continue
                holders[key] = bit
            elif mask & bit:
                continue
            else:
                if added >= room:
                    self.refused += 1
                    continue
                mask |= bit
                holders[key] = shared.setdefault(mask, mask)
            added += 1
        self.pairs += added
        self._counts[slot] += added

    def removed(self, slot: int, hashes: Iterable[bytes]) -> None:
        """These blocks are gone; unknown ones are ignored."""
        bit = self._bits[slot]
        holders, shared = self._holders, self._shared_masks()
        dropped = 0
        for key in hashes:
            mask = holders.get(key)
            if mask is None or not mask & bit:
                continue
            mask ^= bit
            if mask:
                holders[key] = shared.setdefault(mask, mask)
            else:
                del holders[key]
            dropped += 1
        self.pairs -= dropped
        self._counts[slot] -= dropped

    def sweep(self, limit: int = 20_000) -> bool:
        """Removes up to `limit` entries of retired slots. Returns whether there is more to do."""
        if not self._sweep:
            if self._sweep_mask:
                self._retired &= ~self._sweep_mask
                self._sweep_mask = 0
            if not self._retired:
                return False
            self._sweep_mask = self._retired
            self._sweep = list(self._holders)
        holders, gone = self._holders, self._sweep_mask
        part = self._sweep[-limit:]
        del self._sweep[-limit:]
        for key in part:
            mask = holders.get(key, 0)
            if mask & gone:
                self.pairs -= (mask & gone).bit_count()
                if mask & ~gone:
                    holders[key] = mask & ~gone
                else:
                    del holders[key]
        return True

    def get(self, key: bytes) -> int:
        """Mask of the slots that hold a block (retired ones included until swept)."""
        return self._holders.get(key, 0)

    def masks(self, hashes: Sequence[bytes]) -> Iterator[int]:
        """Masks of many blocks, in order; a generator-free loop, as look-ups walk thousands of blocks."""
        return map(self._holders.get, hashes, itertools.repeat(0))


class PredictedBlocks:
    """Blocks that engines should hold because prompts were routed there: an LRU per engine, with an optional expiry."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._lru: dict[int, OrderedDict[bytes, float]] = {}

    def add_engine(self, slot: int) -> None:
        self._lru.setdefault(slot, OrderedDict())

    def remove_engine(self, slot: int) -> None:
        for key in self._lru.pop(slot, ()):
            self._drop(slot, key)

    def _drop(self, slot: int, key: bytes) -> None:
        mask = self._holders.get(key, 0) & ~(1 << slot)
        if mask:
            self._holders[key] = mask
        else:
            self._holders.pop(key, None)

    def count(self, slot: int) -> int:
        return len(self._lru.get(slot, ()))

    def touch(self, slot: int, hashes: Sequence[bytes], now: float, capacity: int) -> None:
        """Notes that a prompt with these blocks went to the engine, which can hold `capacity` blocks."""
        lru = self._lru[slot]
        bit, holders = 1 << slot, self._holders
        # Leaf first: as in the engine's own LRU, the end of a chain is the first to go.
        for key in reversed(hashes):
            if key in lru:
                lru.move_to_end(key)
            else:
                holders[key] = holders.get(key, 0) | bit
            lru[key] = now
        while len(lru) > max(capacity, len(hashes)):
            self._drop(slot, lru.popitem(last=False)[0])

    def expire(self, slot: int, before: float) -> None:
        """Drops what was last touched before that time."""
        lru = self._lru.get(slot)
        while lru:
            key, at = next(iter(lru.items()))
            if at >= before:
                return
            del lru[key]
            self._drop(slot, key)

    def get(self, key: bytes) -> int:
        """Mask of the slots that should hold a block."""
        return self._holders.get(key, 0)

    def masks(self, hashes: Sequence[bytes]) -> Iterator[int]:
        """Masks of many blocks, in order."""
        return map(self._holders.get, hashes, itertools.repeat(0))


def match_depths(hashes: Sequence[bytes], slots: int, *sources: PrefixIndex | PredictedBlocks) -> dict[int, int]:
    """Longest prefix, in blocks, that each engine holds, by any of the sources.

    Args:
        hashes: the prompt's block hashes, in order.
        slots: mask of the engines asked about.

    Returns:
        slot → depth for engines that hold at least one block.
    """
    alive = slots
    depths: dict[int, int] = {}
    second = sources[1].get if len(sources) > 1 else None
    depth = 0
    # A set of engines that is known to hold all that are alive. Long runs of blocks have the same object.
    good: int | None = None
    for mask in sources[0].masks(hashes):
        if mask is not good:
            if alive & mask == alive:
                good = mask
            else:
                # Only here can the other source matter.
                if second is not None:
                    mask |= second(hashes[depth])
                left = alive & mask
                if left != alive:
                    _note(depths, alive & ~left, depth)
                    alive = left
                    if not alive:
                        return depths
        depth += 1
    _note(depths, alive, depth)
    return depths


def _note(depths: dict[int, int], mask: int, depth: int) -> None:
    if depth == 0:
        return
    while mask:
        low = mask & -mask
        depths[low.bit_length() - 1] = depth
        mask ^= low
