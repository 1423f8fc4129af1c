"""Who runs, who waits, and what the step being planned does so far: the state that all of planning shares."""

from __future__ import annotations

import bisect
from collections.abc import Collection

from engine_service.plan import Entry, StepPlan
from engine_service.policy import Key, SchedulerConfig
from engine_service.requests import Choice, Status
from tandem.lm.block_pool import BlockPool


class Batch:
    """The running choices, the queue in policy order, and the entries of the coming step."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.running: list[Choice] = []
        self.waiting: list[tuple[Key, Choice]] = []
        # The step being planned, by sequence id; empty between two plans.
        self.entries: dict[int, Entry] = {}
        self.preempted: list[Choice] = []

    @property
    def left(self) -> int:
        """What is left of the step's token budget."""
        return self.config.max_num_batched_tokens - sum(entry.tokens for entry in self.entries.values())

    @property
    def seats_used(self) -> int:
        """Seats in the batch: running choices, and those that will fork from them."""
        return _seats(self.running)

    def seated(self, choice: Choice, without: Collection[Choice] = ()) -> bool:
        """Whether there are seats for a choice, and those that fork from it, once those in `without` are gone."""
        stay = [other for other in self.running if other not in without]
        return _seats(stay) + 1 + choice.request.forking <= self.config.max_num_seqs

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    # Changes

    def begin(self) -> None:
        """Starts to plan a step."""
        self.entries, self.preempted = {}, []

    def finish(self) -> StepPlan:
        """The step as planned."""
        entries, self.entries = list(self.entries.values()), {}
        return StepPlan(entries, self.preempted)

    def queue(self, choice: Choice) -> None:
        choice.status = Status.WAITING
        bisect.insort(self.waiting, (self.config.key(choice), choice), key=lambda item: item[0])

    def leave(self, choice: Choice) -> None:
        """Takes a choice out of queue or batch and frees its blocks; it has ended."""
        if choice.status is Status.WAITING:
            self.waiting = [item for item in self.waiting if item[1] is not choice]
        elif choice.status is Status.RUNNING:
            self.running.remove(choice)
            self.pool.release(choice.blocks)
        choice.blocks, choice.status = [], Status.FINISHED

    def preempt(self, victim: Choice) -> None:
        """Sends a running choice back to the queue, without its blocks and its part of the step."""
        entry = self.entries.pop(victim.sequence.id, None)
        if entry is not None:
            self.pool.release(entry.held)
            entry.copies, entry.held = [], []
        self.running.remove(victim)
        self.pool.release(victim.blocks)
        victim.blocks, victim.num_computed = [], 0
        victim.request.preemptions += 1
        self.queue(victim)
        self.preempted.append(victim)

    def preempt_for(self, choice: Choice) -> bool:
        """Frees the blocks of the running choice that policy serves last. False if that is not after `choice`.

        A choice that gets nothing keeps what it has and waits: the first in order can always go on, so all do.
        """
        key = self.config.key
        victim = max((c for c in self.running if c.blocks), key=key, default=None)
        if victim is None or key(victim) <= key(choice):
            return False
        self.preempt(victim)
        return True


def _seats(running: list[Choice]) -> int:
    # While some wait to fork, the one they wait for is the request's only running choice.
    return len(running) + sum(choice.request.forking for choice in running)
