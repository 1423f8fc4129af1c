"""The pool of KV blocks: reference counts, prefix cache, LRU eviction. Plain Python; it owns numbers, not tensors.

A block is *used* while somebody holds a reference, else *free*. A full block whose KV is complete may be *registered*
under its chain hash (tandem.block_hash): then it can be found by `match`, also while free, until it is evicted.
Whoever is not the only holder of an unregistered block must not write to it (`writable`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.block_hash import ROOT, hash_block


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free. Callers check `num_free` first."""


class PoolIntegrityError(RuntimeError):
    """The pool's books do not add up: a defect of the program."""


@dataclass(frozen=True, slots=True)
class KvChange:
    """One change of what the prefix cache holds. `number` counts from 1 without gaps."""

    number: int
    kind: str  # "stored", "removed" or "cleared"
    hashes: tuple[bytes, ...] = ()
    parent: bytes = b""


@dataclass(slots=True)
class _Content:
    """What a registered block holds; compared on a hit, so that a hash collision is a miss."""

    hash: bytes
    parent: bytes
    salt: bytes
    tokens: bytes


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    return np.asarray(token_ids, dtype="<u4").tobytes()


class BlockPool:
    """Blocks 0 … num_blocks − 1 of `block_size` tokens. One thread uses it.

    All operations cost O(blocks named), whatever the pool's size. Freed blocks are reused least recently used first;
    blocks without cached content go first of all.
    """

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens is empty")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._refs = [0] * num_blocks
        self._content: list[_Content | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(num_blocks))
        self._changes: list[KvChange] = []
        self.last_number = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now (cached or not)."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Registered blocks, used or free."""
        return len(self._by_hash)

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def is_registered(self, block: int) -> bool:
        return self._content[block] is not None

    def writable(self, block: int) -> bool:
        """True for the only holder of a block without registered content."""
        return self._refs[block] == 1 and self._content[block] is None

    def match(self, hashes: Sequence[bytes], packed: bytes, salt: bytes) -> list[int]:
        """Blocks that hold the longest cached prefix. Takes no references.

        hashes: chain hashes of the sequence's full blocks; packed: its token ids as little-endian u32.
        """
        found: list[int] = []
        step, parent = 4 * self.block_size, ROOT
        for index, digest in enumerate(hashes):
            block = self._by_hash.get(digest)
            if block is None:
                break
            content = self._content[block]
            tokens = packed[index * step : (index + 1) * step]
            if content is None or content.tokens != tokens or content.salt != salt or content.parent != parent:
                break
            found.append(block)
            parent = digest
        return found

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have no holder, so that taking them lowers `num_free`."""
        return sum(self._refs[block] == 0 for block in blocks)

    def take(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, evicting cached content of the least recently used ones.

        Raises:
            OutOfBlocksError: fewer are free. Nothing is taken then.
        """
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free of {self.num_blocks}")
        blocks = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self.unregister(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each block of a table. The table's tail is evicted before its head."""
        for block in reversed(blocks):
            if self._refs[block] <= 0:
                raise PoolIntegrityError(f"block {block} was released without a holder")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._content[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, digest: bytes, parent: bytes, salt: bytes, token_ids: Sequence[int]) -> bool:
        """Makes a full, computed block findable. False if an equal one is registered: this one stays private."""
        if not self.caching or digest in self._by_hash or self._content[block] is not None:
            return False
        self._content[block] = _Content(digest, parent, salt, pack_tokens(token_ids))
        self._by_hash[digest] = block
        self._change("stored", (digest,), b"" if parent == ROOT else parent)
        return True

    def unregister(self, block: int) -> None:
        """Forgets the block's cached content, if it has any; holders keep the block."""
        content = self._content[block]
        if content is None:
            return
        self._content[block] = None
        del self._by_hash[content.hash]
        self._change("removed", (content.hash,))

    def reset(self) -> int:
        """Forgets all cached content; used blocks stay with their holders. Returns the number forgotten."""
        forgotten = len(self._by_hash)
        self._content = [None] * self.num_blocks
        self._by_hash.clear()
        if forgotten:
            self._change("cleared")
        return forgotten

    def take_changes(self) -> list[KvChange]:
        """Changes since the last call, in order; neighbours in one chain are merged by the reader, not here."""
        changes, self._changes = self._changes, []
        return changes

    def _change(self, kind: str, hashes: tuple[bytes, ...] = (), parent: bytes = b"") -> None:
        self.last_number += 1
        self._changes.append(KvChange(self.last_number, kind, hashes, parent))

    def check(self, tables: Iterable[Sequence[int]] = ()) -> None:
        """Verifies the books against the block tables of all holders.

        Raises:
            PoolIntegrityError: with what does not add up.
        """
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block] += 1
        for block, (refs, holders) in enumerate(zip(self._refs, held, strict=True)):
            if refs != holders:
                raise PoolIntegrityError(f"block {block} counts {refs} references, but {holders} tables hold it")
            if (refs == 0) != (block in self._free):
                raise PoolIntegrityError(f"block {block} with {refs} references is on the wrong side of the free list")
        for digest, block in self._by_hash.items():
            content = self._content[block]
            if content is None or content.hash != digest:
                raise PoolIntegrityError(f"hash {digest.hex()} points to block {block}, which holds something else")
            tokens = np.frombuffer(content.tokens, dtype="<u4")
            if len(tokens) != self.block_size or hash_block(content.parent, content.salt, tokens) != digest:
                raise PoolIntegrityError(f"block {block} is registered under a hash that is not its own")
        if sum(content is not None for content in self._content) != len(self._by_hash):
            raise PoolIntegrityError("registered blocks and hashes differ in number")
