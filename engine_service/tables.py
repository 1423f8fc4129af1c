"""Block tables: blocks for the positions that a step writes, copy-on-write, and what the prefix cache may keep."""

from __future__ import annotations

from engine_service.batch import Batch
from engine_service.plan import Entry
from engine_service.requests import Choice
from tandem.block_hash import ROOT


class BlockTables:
    """Grows and shrinks the tables of running choices. When blocks run out, the batch preempts."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._pool = batch.pool

    def cover(self, entry: Entry, end: int, *, preempt: bool) -> int:
        """Makes blocks writable for positions start … end − 1, as far as memory allows.

        Returns the end that was reached; entry.start means none.
        """
        choice, size = entry.choice, self._pool.block_size
        first = entry.start // size
        if first < len(choice.blocks) and not self._own(entry, first, preempt):
            return entry.start
        need = self._batch.blocks_for(end) - len(choice.blocks)
        while need > self._pool.num_free and preempt and self._batch.preempt_for(choice):
            pass
        choice.blocks += self._pool.allocate(max(0, min(need, self._pool.num_free)))
        return max(entry.start, min(end, len(choice.blocks) * size))

    def _own(self, entry: Entry, index: int, preempt: bool) -> bool:
        """Copy-on-write of the block in which the entry starts to write."""
        blocks, pool = entry.choice.blocks, self._pool
        while not pool.writable(blocks[index]):
            old = blocks[index]
            if pool.num_free:
                (new,) = pool.allocate(1)
                blocks[index] = new
                if entry.start % pool.block_size:
                    entry.copies.append((old, new))
                    entry.held.append(old)
                else:
                    pool.release([old])
            elif pool.ref_count(old) == 1:
                # No other block is left: give up the cached content rather than somebody's work.
                pool.unregister(old)
            elif not preempt or not self._batch.preempt_for(entry.choice):
                return False
        return True

    def register(self, choice: Choice) -> None:
        """Registers blocks whose KV is complete."""
        size, ids = self._pool.block_size, choice.sequence.token_ids
        full = choice.num_computed // size
        choice.grow_hashes(full, size)
        for index in range(choice.registered, full):
            parent = choice.hashes[index - 1] if index else ROOT
            tokens = ids[index * size : (index + 1) * size]
            self._pool.register(choice.blocks[index], choice.hashes[index], parent, choice.request.salt, tokens)
        choice.registered = max(choice.registered, full)

    def trim(self, choice: Choice) -> None:
        """Frees the blocks beyond what is computed: rejected drafts had them."""
        keep = self._batch.blocks_for(choice.num_computed)
        self._pool.release(choice.blocks[keep:])
        del choice.blocks[keep:]

    def share(self, leader: Choice, choice: Choice) -> None:
        """Gives a choice the leader's blocks of the prompt; it has at least its last token left to compute."""
        prompt_len = leader.sequence.prompt_len
        choice.num_computed = min(prompt_len, len(choice.sequence.token_ids) - 1)
        choice.registered = choice.num_computed // self._pool.block_size
        choice.blocks = leader.blocks[: self._batch.blocks_for(prompt_len)]
        self._pool.take(choice.blocks)
