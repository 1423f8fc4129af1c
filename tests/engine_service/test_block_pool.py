"""The block pool's books: counts, cache, eviction order, collisions."""

from __future__ import annotations

import pytest

from tandem.block_hash import ROOT, hash_chain
from tandem.lm.block_pool import BlockPool, OutOfBlocksError, PoolIntegrityError, pack_tokens


def fill(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Allocates and registers the blocks of a sequence."""
    hashes = hash_chain(tokens, pool.block_size, salt)
    blocks = pool.allocate(len(hashes))
    for index, digest in enumerate(hashes):
        piece = tokens[index * pool.block_size : (index + 1) * pool.block_size]
        pool.register(blocks[index], digest, hashes[index - 1] if index else ROOT, salt, piece)
    return blocks


def match(pool: BlockPool, tokens: list[int], salt: bytes = b"") -> list[int]:
    return pool.match(hash_chain(tokens, pool.block_size, salt), pack_tokens(tokens), salt)


def test_freed_prefix_is_found_and_taken_again() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(12))
    blocks = fill(pool, tokens)
    pool.release(blocks)
    assert pool.num_free == 8 and pool.num_cached == 3
    assert match(pool, tokens) == blocks
    assert match(pool, [*tokens[:8], 99, 98, 97, 96]) == blocks[:2]
    pool.take(blocks)
    assert pool.num_free == 5
    pool.check([blocks])


def test_salt_separates() -> None:
    pool = BlockPool(8, 4)
    pool.release(fill(pool, list(range(8)), b"a"))
    assert match(pool, list(range(8)), b"b") == []
    assert len(match(pool, list(range(8)), b"a")) == 2


def test_hash_collision_is_a_miss() -> None:
    pool = BlockPool(8, 4)
    tokens, other = [1, 2, 3, 4], [5, 6, 7, 8]
    hashes = hash_chain(tokens, 4)
    (block,) = pool.allocate(1)
    pool.register(block, hashes[0], ROOT, b"", tokens)
    assert pool.match(hashes, pack_tokens(other), b"") == []
    assert pool.match(hashes, pack_tokens(tokens), b"x") == []


def test_eviction_is_least_recently_used_and_tail_first() -> None:
    pool = BlockPool(4, 2)
    first, second = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6, 7, 8])
    pool.release(first)
    pool.release(second)
    assert pool.allocate(1) == [first[1]]
    assert pool.allocate(1) == [first[0]]
    assert match(pool, [5, 6, 7, 8]) == second
    assert match(pool, [1, 2, 3, 4]) == []


def test_uncached_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4, 2)
    cached = fill(pool, [1, 2])
    pool.release(cached)
    plain = pool.allocate(3)
    assert cached[0] not in plain
    pool.release(plain)
    assert pool.allocate(3) != [cached[0]]
    assert pool.num_cached == 1


def test_allocation_beyond_free_takes_nothing() -> None:
    pool = BlockPool(2, 2)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(3)
    assert pool.num_free == 2


def test_writable_only_for_the_sole_holder_of_private_content() -> None:
    pool = BlockPool(4, 2)
    (block,) = pool.allocate(1)
    assert pool.writable(block)
    pool.take([block])
    assert not pool.writable(block)
    pool.release([block])
    pool.register(block, hash_chain([1, 2], 2)[0], ROOT, b"", [1, 2])
    assert not pool.writable(block)
    pool.unregister(block)
    assert pool.writable(block)


def test_changes_are_numbered_without_gaps() -> None:
    pool = BlockPool(2, 2)
    blocks = fill(pool, [1, 2, 3, 4])
    pool.release(blocks)
    pool.allocate(2)
    fill_changes = pool.take_changes()
    assert [change.kind for change in fill_changes] == ["stored", "stored", "removed", "removed"]
    assert [change.number for change in fill_changes] == [1, 2, 3, 4]
    assert fill_changes[0].parent == b"" and fill_changes[1].parent == fill_changes[0].hashes[0]
    assert pool.reset() == 0 and pool.take_changes() == []


def test_reset_forgets_but_holders_keep_blocks() -> None:
    pool = BlockPool(4, 2)
    blocks = fill(pool, [1, 2, 3, 4])
    assert pool.reset() == 2
    assert match(pool, [1, 2, 3, 4]) == []
    pool.check([blocks])
    pool.release(blocks)
    assert pool.num_free == 4


def test_check_finds_wrong_books() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    with pytest.raises(PoolIntegrityError, match="references"):
        pool.check([blocks[:1]])
    pool.release(blocks)
    with pytest.raises(PoolIntegrityError, match="without a holder"):
        pool.release(blocks)


def test_caching_off_registers_nothing() -> None:
    pool = BlockPool(4, 2, caching=False)
    pool.release(fill(pool, [1, 2, 3, 4]))
    assert pool.num_cached == 0 and pool.take_changes() == []
