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

from collections.abc import Iterable, Mapping

from engine_service.admission import Admission, check_fits
from engine_service.batch import Batch
from engine_service.plan import Entry, StepPlan
from engine_service.policy import Key, SchedulerConfig
from engine_service.requests import Choice, Request, Status
from engine_service.tables import BlockTables
from tandem.lm.block_pool import BlockPool

# The longest-standing prefill gets at least this share of what prefill may spend, however many short ones come.
OLDEST_SHARE = 4


class Scheduler:
    """Owns requests, batch and block tables."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.requests: dict[int, Request] = {}
        self._batch = Batch(config, pool)
        self._tables = BlockTables(self._batch)
        self._admission = Admission(self._batch)

    # What is so

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def running(self) -> list[Choice]:
        return self._batch.running

    @property
    def waiting(self) -> list[Choice]:
        """The queue in policy order."""
        return [choice for _key, choice in self._batch.waiting]

    @property
    def seats_used(self) -> int:
        return self._batch.seats_used

    def key(self, choice: Choice) -> Key:
        return self.config.key(choice)

    def decoding(self) -> list[Choice]:
        """Choices that will decode in the next step unless memory runs out, in policy order."""
        return sorted((choice for choice in self.running if choice.remaining == 1), key=self.key)

    def next_deadline(self) -> float | None:
        return min((r.deadline for r in self.requests.values() if r.deadline is not None), default=None)

    def check(self) -> None:
        """Verifies the pool's books against all block tables. Valid between steps.

        Raises:
            PoolIntegrityError: they do not add up.
        """
        self.pool.check(choice.blocks for choice in self.running)

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
        self._batch.queue(leader)

    def cancel(self, request_id: int) -> Request | None:
        """Ends a request in any state and frees its blocks. None if it is gone already."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        for choice in request.unfinished:
            self._batch.leave(choice)
        return request

    def expire(self, now: float) -> list[Request]:
        """Ends the requests whose deadline has passed."""
        late = [r for r in self.requests.values() if r.deadline is not None and r.deadline <= now]
        for request in late:
            self.cancel(request.id)
        return late

    # Planning

    def plan(self, drafts: Mapping[int, tuple[int, ...]] | None = None) -> StepPlan:
        """Plans one step. drafts: guesses by sequence id, which may be cut to what budget and memory allow."""
        self._batch.begin()
        self._plan_decodes(drafts or {})
        self._admission.run()
        self._plan_prefills()
        self._top_up()
        return self._batch.finish()

    def _plan_decodes(self, drafts: Mapping[int, tuple[int, ...]]) -> None:
        """Gives every decoding choice its token, then drafts from half of what is left if others want it too."""
        decoding = self.decoding()
        shared = len(decoding) < len(self.running) or bool(self._batch.waiting)
        for_drafts = (self.config.max_num_batched_tokens - len(decoding)) // (2 if shared else 1)
        for choice in decoding:
            entry = Entry(choice, choice.num_computed, 1)
            if choice.status is not Status.RUNNING or not self._place(entry):
                continue  # preempted for an earlier one, or no block is free for it now
            wanted = drafts.get(choice.sequence.id, ())[:for_drafts]
            if wanted:
                end = self._tables.cover(entry, entry.start + 1 + len(wanted), preempt=False)
                entry.drafts = wanted[: end - entry.start - 1]
                for_drafts -= len(entry.drafts)

    def _plan_prefills(self) -> None:
        """Chunks for the other running choices: the one with least left first, and a share for the oldest."""
        batch = self._batch
        pending = [choice for choice in batch.running if choice.sequence.id not in batch.entries]
        if not pending:
            return
        oldest = min(pending, key=self.key)
        room = batch.left
        if self.config.prefill_budget and len(batch.running) > 1:
            room = min(room, self.config.prefill_budget)
        reserved = max(1, room // OLDEST_SHARE) if len(pending) > 1 else 0
        for choice in sorted(pending, key=self.config.prefill_key):
            if choice is oldest:
                reserved = 0
            if choice.status is Status.RUNNING:
                before = batch.left
                self._chunk(choice, min(self.config.prefill_chunk, room - reserved, batch.left))
                room -= before - batch.left

    def _top_up(self) -> None:
        """Lets prefills exceed their cap when nobody decodes and budget is left."""
        batch = self._batch
        if any(entry.decodes for entry in batch.entries.values()):
            return
        if self.config.prefill_budget and len(batch.running) > 1:
            return
        for entry in list(batch.entries.values()):
            more = min(entry.choice.remaining - entry.count, batch.left)
            if more > 0:
                end = self._tables.cover(entry, entry.start + entry.count + more, preempt=False)
                entry.count = end - entry.start

    def _chunk(self, choice: Choice, budget: int) -> None:
        """Plans up to `budget` tokens of a prefill; fewer if blocks are short and nobody later holds any."""
        count = min(choice.remaining, budget)
        if count > 0:
            self._place(Entry(choice, choice.num_computed, count))

    def _place(self, entry: Entry) -> bool:
        """Adds an entry to the step with as many of its tokens as memory allows. False if that is none."""
        # It is in the plan while blocks are sought, so that its own references are found if it is preempted.
        entries = self._batch.entries
        entries[entry.choice.sequence.id] = entry
        end = self._tables.cover(entry, entry.start + entry.count, preempt=True)
        if end <= entry.start:
            entries.pop(entry.choice.sequence.id, None)
            return False
        entry.count = end - entry.start
        return True

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
        self._tables.register(choice)
        self._tables.trim(choice)
        if choice.request.forking and choice.num_computed >= sequence.prompt_len:
            self._fork(choice)
        if finished:
            self._batch.leave(choice)
            if not choice.request.unfinished:
                self.requests.pop(choice.request.id, None)

    def _fork(self, leader: Choice) -> None:
        """Lets the other choices share the leader's prompt; each recomputes its last token to sample its own next."""
        leader.request.forking = 0
        for choice in leader.request.choices:
            if choice.status is Status.FORKING:
                self._tables.share(leader, choice)
                choice.status = Status.RUNNING
                choice.admitted_before = True
                self.running.append(choice)
