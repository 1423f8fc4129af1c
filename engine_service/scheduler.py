"""Decides what each step computes. Pure: state and events in, a StepPlan out; no tensors, clock, input or output.

There are no phases: every running choice owes `remaining` tokens of KV. A step spends one token budget: choices that
owe one token (they decode) come first and may add drafts; then the queue's head is admitted; what is left of the budget
goes to prefill chunks.

Policy is one static key per request, smaller is served sooner. fcfs: arrival. priority: arrival + priority × age
seconds, so a request of lower rank overtakes after it has waited that much longer, and nothing starves. When blocks run
out, the running choice with the largest key is preempted, never one with a smaller key than the choice that needs them.
Under priority a waiting choice takes seats and blocks of running ones with larger keys in the same way.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine_service.plan import Entry, StepPlan
from engine_service.requests import Choice, Request, Status
from tandem.block_hash import ROOT
from tandem.errors import TandemError
from tandem.lm.block_pool import BlockPool, pack_tokens

# The longest-standing prefill gets at least this share of what prefill may spend, however many short ones come.
OLDEST_SHARE = 4

Key = tuple[float, int, int]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy. Tokens, sequences, seconds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    # Most prompt tokens of one choice in a step that it shares with others.
    prefill_chunk: int
    policy: str = "fcfs"
    priority_age_s: float = 10.0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but must be at least max_num_seqs = "
                f"{self.max_num_seqs}, so that every running sequence can decode in each step"
            )


class Scheduler:
    """Owns the queue, the batch and the block tables."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.requests: dict[int, Request] = {}
        self.running: list[Choice] = []
        self.waiting: list[tuple[Key, Choice]] = []
        # The step being planned; empty between calls of plan().
        self._entries: dict[int, Entry] = {}
        self._preempted: list[Choice] = []

    # Events

    def add(self, request: Request) -> None:
        """Queues a request whose choices are made. Choices that are finished already are left alone.

        Raises:
            TandemError: NEVER_FITS, if the pool is too small for a choice of it.
        """
        for choice in request.unfinished:
            check_fits(choice.sequence.prompt_len, choice.max_output, self.pool)
        self.requests[request.id] = request
        leader, *others = request.unfinished
        for choice in others:
            choice.status = Status.FORKING
        request.forking = len(others)
        self._queue(leader)

    def cancel(self, request_id: int) -> Request | None:
        """Ends a request in any state and frees its blocks. None if it is gone already."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        for choice in request.unfinished:
            self._end(choice)
        return request

    def expire(self, now: float) -> list[Request]:
        """Ends the requests whose deadline has passed."""
        late = [r for r in self.requests.values() if r.deadline is not None and r.deadline <= now]
        for request in late:
            self.cancel(request.id)
        return late

    def next_deadline(self) -> float | None:
        return min((r.deadline for r in self.requests.values() if r.deadline is not None), default=None)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def seats_used(self) -> int:
        """Seats in the batch: running choices, and those that will fork from them."""
        return _seats(self.running)

    def decoding(self) -> list[Choice]:
        """Choices that will decode in the next step unless memory runs out, in policy order."""
        return sorted((choice for choice in self.running if choice.remaining == 1), key=self.key)

    def key(self, choice: Choice) -> Key:
        request = choice.request
        sooner = request.arrival
        if self.config.policy == "priority":
            sooner += request.priority * self.config.priority_age_s
        return sooner, request.id, choice.sequence.choice

    # Planning

    def plan(self, drafts: Mapping[int, tuple[int, ...]] | None = None) -> StepPlan:
        """Plans one step. drafts: guesses by sequence id, which may be cut to what budget and memory allow."""
        self._entries, self._preempted = {}, []
        self._plan_decodes(drafts or {})
        self._admit()
        self._plan_prefills()
        self._top_up()
        entries, self._entries = list(self._entries.values()), {}
        return StepPlan(entries, self._preempted)

    def _plan_decodes(self, drafts: Mapping[int, tuple[int, ...]]) -> None:
        """Gives every decoding choice its token, then drafts from half of what is left if others want it too."""
        decoding = self.decoding()
        shared = len(decoding) < len(self.running) or bool(self.waiting)
        for_drafts = (self.config.max_num_batched_tokens - len(decoding)) // (2 if shared else 1)
        for choice in decoding:
            entry = Entry(choice, choice.num_computed, 1)
            if choice.status is not Status.RUNNING or not self._place(entry):
                continue  # preempted for an earlier one, or no block is free for it now
            wanted = drafts.get(choice.sequence.id, ())[:for_drafts]
            if wanted:
                end = self._cover(entry, entry.start + 1 + len(wanted), preempt=False)
                entry.drafts = wanted[: end - entry.start - 1]
                for_drafts -= len(entry.drafts)

    def _plan_prefills(self) -> None:
        """Chunks for the other running choices: the one with least left first (under `priority` within its rank)."""
        pending = [choice for choice in self.running if choice.sequence.id not in self._entries]
        if not pending:
            return
        oldest = min(pending, key=self.key)
        reserved = max(1, self._left() // OLDEST_SHARE) if len(pending) > 1 else 0
        for choice in sorted(pending, key=self._prefill_key):
            if choice is oldest:
                reserved = 0
            if choice.status is Status.RUNNING:
                self._chunk(choice, min(self.config.prefill_chunk, self._left() - reserved))

    def _prefill_key(self, choice: Choice) -> tuple[int, int, Key]:
        rank = choice.request.priority if self.config.policy == "priority" else 0
        return rank, choice.remaining, self.key(choice)

    def _top_up(self) -> None:
        """Lets prefills exceed their cap when nobody decodes and budget is left."""
        if any(entry.samples and entry.count == 1 for entry in self._entries.values()):
            return
        for entry in list(self._entries.values()):
            more = min(entry.choice.remaining - entry.count, self._left())
            if more > 0:
                entry.count = self._cover(entry, entry.start + entry.count + more, preempt=False) - entry.start

    def _left(self) -> int:
        return self.config.max_num_batched_tokens - sum(entry.tokens for entry in self._entries.values())

    def _chunk(self, choice: Choice, budget: int) -> None:
        """Plans up to `budget` tokens of a prefill; fewer if blocks are short and nobody later holds any."""
        count = min(choice.remaining, budget)
        if count > 0:
            self._place(Entry(choice, choice.num_computed, count))

    def _place(self, entry: Entry) -> bool:
        """Adds an entry to the step with as many of its tokens as memory allows. False if that is none."""
        # It is in the plan while blocks are sought, so that its own references are found if it is preempted.
        self._entries[entry.choice.sequence.id] = entry
        end = self._cover(entry, entry.start + entry.count, preempt=True)
        if end <= entry.start:
            self._entries.pop(entry.choice.sequence.id, None)
            return False
        entry.count = end - entry.start
        return True

    def _admit(self) -> None:
        """Moves choices from the queue into the batch, in policy order, while seats, tokens and blocks last."""
        while self.waiting and not self._preempted:
            choice = self.waiting[0][1]
            room = self._room(choice)
            if room is None:
                return
            victims, matched = room
            for victim in victims:
                self._preempt(victim)
            # Still the head: every victim's key is larger.
            self.waiting.pop(0)
            self._start(choice, matched)

    def _room(self, choice: Choice) -> tuple[list[Choice], list[int]] | None:
        """Whom to preempt so that a waiting choice gets in, and its cached blocks. None: it has to wait.

        Only `priority` preempts for one that waits: under fcfs whoever runs came earlier.
        """
        later: list[Choice] = []
        if self.config.policy == "priority":
            later = sorted((other for other in self.running if self.key(other) > self.key(choice)), key=self.key)
        if not later and not self._seated(choice, self.running):
            return None
        matched, victims = self._match(choice), list[Choice]()
        while not self._fits(choice, matched, victims):
            if not later:
                return None
            victims.append(later.pop())
        return victims, matched

    def _fits(self, choice: Choice, matched: list[int], victims: list[Choice]) -> bool:
        """Whether seats, tokens and blocks suffice to admit a choice once the victims are gone."""
        stay = [other for other in self.running if other not in victims]
        if not self._seated(choice, stay):
            return False
        entries = (self._entries.get(victim.sequence.id) for victim in victims)
        if self._left() + sum(entry.tokens for entry in entries if entry is not None) <= 0:
            return False
        # A matched block that a victim alone holds is not won: the choice takes it over.
        freed = {block for victim in victims for block in victim.blocks if self.pool.ref_count(block) == 1}
        return not stay or self._need(choice, matched, stay) <= self.pool.num_free + len(freed.difference(matched))

    def _seated(self, choice: Choice, running: list[Choice]) -> bool:
        """Whether there are seats for a choice, and those that fork from it, beside the running ones."""
        return _seats(running) + 1 + choice.request.forking <= self.config.max_num_seqs

    def _match(self, choice: Choice) -> list[int]:
        if choice.wants_scores or not self.pool.caching:
            return []
        ids, size = choice.sequence.token_ids, self.pool.block_size
        choice.grow_hashes(len(ids) // size, size)
        return self.pool.match(choice.hashes, pack_tokens(ids), choice.request.salt)

    def _need(self, choice: Choice, matched: list[int], running: list[Choice]) -> int:
        """Free blocks wanted to admit: its own, those that running prefills still need, one per running choice."""
        own = self._blocks_for(len(choice.sequence.token_ids)) - len(matched) + self.pool.count_free(matched)
        promised = sum(max(0, self._blocks_for(len(other.sequence.token_ids)) - len(other.blocks)) for other in running)
        return own + promised + len(running) + 1

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _start(self, choice: Choice, matched: list[int]) -> None:
        """Puts a choice into the batch on its cached prefix. A fully cached one still computes its last token."""
        self.pool.take(matched)
        choice.blocks = list(matched)
        choice.num_computed = min(len(matched) * self.pool.block_size, len(choice.sequence.token_ids) - 1)
        choice.registered = choice.num_computed // self.pool.block_size
        choice.status = Status.RUNNING
        self.running.append(choice)
        request = choice.request
        if choice is request.choices[0] and not choice.admitted_before:
            request.cached_tokens = min(choice.num_computed, choice.sequence.prompt_len)
            request.cached_blocks = len(matched)
        choice.admitted_before = True

    # Blocks

    def _cover(self, entry: Entry, end: int, *, preempt: bool) -> int:
        """Makes blocks writable for positions start … end − 1, as far as memory allows.

        Returns the end that was reached; entry.start means none.
        """
        choice, size = entry.choice, self.pool.block_size
        first = entry.start // size
        if first < len(choice.blocks) and not self._own(entry, first, preempt):
            return entry.start
        need = self._blocks_for(end) - len(choice.blocks)
        while need > self.pool.num_free and preempt and self._preempt_for(choice):
            pass
        choice.blocks += self.pool.allocate(max(0, min(need, self.pool.num_free)))
        return max(entry.start, min(end, len(choice.blocks) * size))

    def _own(self, entry: Entry, index: int, preempt: bool) -> bool:
        """Copy-on-write of the block in which the entry starts to write."""
        blocks, pool = entry.choice.blocks, self.pool
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
            elif not preempt or not self._preempt_for(entry.choice):
                return False
        return True

    def _preempt_for(self, choice: Choice) -> bool:
        """Frees the blocks of the running choice that policy serves last. False if that is not after `choice`.

        A choice that gets nothing keeps what it has and waits: the first in order can always go on, so all do.
        """
        victim = max((c for c in self.running if c.blocks), key=self.key, default=None)
        if victim is None or self.key(victim) <= self.key(choice):
            return False
        self._preempt(victim)
        return True

    def _preempt(self, victim: Choice) -> None:
        entry = self._entries.pop(victim.sequence.id, None)
        if entry is not None:
            self.pool.release(entry.held)
            entry.copies, entry.held = [], []
        self.running.remove(victim)
        self.pool.release(victim.blocks)
        victim.blocks, victim.num_computed = [], 0
        victim.request.preemptions += 1
        self._queue(victim)
        self._preempted.append(victim)

    def _queue(self, choice: Choice) -> None:
        choice.status = Status.WAITING
        bisect.insort(self.waiting, (self.key(choice), choice), key=lambda item: item[0])

    # Results

    def commit(self, entry: Entry, tokens: Iterable[int], accepted: int, finished: bool) -> None:
        """Books what a slice committed: `tokens` (already cut at any stop), of which `accepted` were drafts."""
        choice = entry.choice
        self.pool.release(entry.held)
        if choice.status is not Status.RUNNING:
            return  # cancelled while the step ran
        sequence = choice.sequence
        sequence.token_ids.extend(tokens)
        choice.num_computed = min(entry.start + entry.count + accepted, len(sequence.token_ids))
        if choice.wants_scores:
            choice.scored = max(choice.scored, min(choice.num_computed, sequence.prompt_len - 1))
        self._register(choice)
        keep = self._blocks_for(choice.num_computed)
        self.pool.release(choice.blocks[keep:])
        del choice.blocks[keep:]
        if choice.request.forking and choice.num_computed >= sequence.prompt_len:
            self._fork(choice)
        if finished:
            self._end(choice)
            if not choice.request.unfinished:
                self.requests.pop(choice.request.id, None)

    def _register(self, choice: Choice) -> None:
        """Registers blocks whose KV is complete."""
        size, ids = self.pool.block_size, choice.sequence.token_ids
        full = choice.num_computed // size
        choice.grow_hashes(full, size)
        for index in range(choice.registered, full):
            parent = choice.hashes[index - 1] if index else ROOT
            tokens = ids[index * size : (index + 1) * size]
            self.pool.register(choice.blocks[index], choice.hashes[index], parent, choice.request.salt, tokens)
        choice.registered = max(choice.registered, full)

    def _fork(self, leader: Choice) -> None:
        """Lets the other choices share the leader's prompt; each recomputes its last token to sample its own next."""
        prompt_len, leader.request.forking = leader.sequence.prompt_len, 0
        for choice in leader.request.choices:
            if choice.status is not Status.FORKING:
                continue
            choice.num_computed = min(prompt_len, len(choice.sequence.token_ids) - 1)
            choice.registered = choice.num_computed // self.pool.block_size
            choice.blocks = leader.blocks[: self._blocks_for(prompt_len)]
            self.pool.take(choice.blocks)
            choice.status = Status.RUNNING
            choice.admitted_before = True
            self.running.append(choice)

    def _end(self, choice: Choice) -> None:
        if choice.status is Status.WAITING:
            self.waiting = [item for item in self.waiting if item[1] is not choice]
        elif choice.status is Status.RUNNING:
            self.running.remove(choice)
            self.pool.release(choice.blocks)
        choice.blocks, choice.status = [], Status.FINISHED

    def check(self) -> None:
        """Verifies the pool's books against all block tables. Valid between steps.

        Raises:
            PoolIntegrityError: they do not add up.
        """
        self.pool.check(choice.blocks for choice in self.running)


def _seats(running: list[Choice]) -> int:
    # While some wait to fork, the one they wait for is the request's only running choice.
    return len(running) + sum(choice.request.forking for choice in running)


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
