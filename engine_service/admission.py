"""Who may leave the queue for the batch: cached prefix, seats, tokens, blocks, and whom to preempt for it."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.batch import Batch
from engine_service.requests import Choice, Status
from tandem.errors import TandemError
from tandem.lm.block_pool import BlockPool, pack_tokens


@dataclass(frozen=True, slots=True)
class Room:
    """How a waiting choice gets in: whom to preempt first, and the cached blocks of its prefix."""

    victims: list[Choice]
    matched: list[int]


class Admission:
    """Moves choices from the queue into the batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._pool = batch.pool

    def run(self) -> None:
        """Admits in policy order, while seats, tokens and blocks last."""
        batch = self._batch
        while batch.waiting and not batch.preempted:
            choice = batch.waiting[0][1]
            room = self._room(choice)
            if room is None:
                return
            for victim in room.victims:
                batch.preempt(victim)
            # Still the head: every victim's key is larger.
            batch.waiting.pop(0)
            self._start(choice, room.matched)

    def _room(self, choice: Choice) -> Room | None:
        """None: it has to wait. Only `priority` preempts for one that waits: under fcfs whoever runs came earlier."""
        later, key = list[Choice](), self._batch.config.key
        if self._batch.config.by_priority:
            later = sorted((other for other in self._batch.running if key(other) > key(choice)), key=key)
        if not later and not self._batch.seated(choice):
            return None
        matched, victims = self._match(choice), list[Choice]()
        while not self._fits(choice, matched, victims):
            if not later:
                return None
            victims.append(later.pop())
        return Room(victims, matched)

    def _match(self, choice: Choice) -> list[int]:
        """Blocks of the longest cached prefix."""
        if choice.wants_scores or not self._pool.caching:
            return []
        ids, size = choice.sequence.token_ids, self._pool.block_size
        choice.grow_hashes(len(ids) // size, size)
        return self._pool.match(choice.hashes, pack_tokens(ids), choice.request.salt)

    def _fits(self, choice: Choice, matched: list[int], victims: list[Choice]) -> bool:
        """Whether seats, tokens and blocks suffice to admit a choice once the victims are gone."""
        batch, pool = self._batch, self._pool
        if not batch.seated(choice, without=victims):
            return False
        entries = (batch.entries.get(victim.sequence.id) for victim in victims)
        if batch.left + sum(entry.tokens for entry in entries if entry is not None) <= 0:
            return False
        stay = [other for other in batch.running if other not in victims]
        # A matched block that a victim alone holds is not won: the choice takes it over.
        freed = {block for victim in victims for block in victim.blocks if pool.ref_count(block) == 1}
        return not stay or self._need(choice, matched, stay) <= pool.num_free + len(freed.difference(matched))

    def _need(self, choice: Choice, matched: list[int], running: list[Choice]) -> int:
        """Free blocks wanted to admit: its own, those that running prefills still need, one per running choice."""
        blocks_for = self._batch.blocks_for
        own = blocks_for(len(choice.sequence.token_ids)) - len(matched) + self._pool.count_free(matched)
        promised = sum(max(0, blocks_for(len(other.sequence.token_ids)) - len(other.blocks)) for other in running)
        return own + promised + len(running) + 1

    def _start(self, choice: Choice, matched: list[int]) -> None:
        """Puts a choice into the batch on its cached prefix. A fully cached one still computes its last token."""
        self._pool.take(matched)
        choice.blocks = list(matched)
        choice.num_computed = min(len(matched) * self._pool.block_size, len(choice.sequence.token_ids) - 1)
        choice.registered = choice.num_computed // self._pool.block_size
        choice.status = Status.RUNNING
        self._batch.running.append(choice)
        request = choice.request
        if choice is request.choices[0] and not choice.admitted_before:
            request.cached_tokens = min(choice.num_computed, choice.sequence.prompt_len)
            request.cached_blocks = len(matched)
        choice.admitted_before = True


def check_fits(prompt_len: int, max_output: int, pool: BlockPool) -> None:
    """Raises NEVER_FITS if one choice's whole KV exceeds the pool (the newest token has no KV)."""
    need = -(-(prompt_len + max(1, max_output) - 1) // pool.block_size)
    if need > pool.num_blocks:
        raise TandemError(
            "NEVER_FITS",
            f"the request needs up to {need} KV blocks of {pool.block_size} tokens ({prompt_len} prompt tokens + "
            f"{max_output} output tokens), but the pool has {pool.num_blocks}",
            need_blocks=need,
            pool_blocks=pool.num_blocks,
        )
