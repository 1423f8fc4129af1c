"""Speculation as the step loop uses it: asks the draft service, keeps its answers, drafts with the head where that is
better, and decides how many drafts to run.

Order of calls in a step: `propose` before planning; after the step `observe` per sequence, `finished` for those that
ended, then `step_done`, which already asks for the next step, so that the answer travels while the loop does its own
bookkeeping. All calls come from one thread.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from engine_service.speculation import MAX_DRAFTS, Draft, NullSpeculation, SpecCandidate, SpeculationController
from engine_service.speculation.client import DraftClient, NoClient
from engine_service.speculation.control import Acceptance, LengthControl, Offer
from engine_service.speculation.dialogue import MAX_LAST_WORDS, MESSAGE_MS, Absorbed, Dialogue
from engine_service.speculation.head import NAME as HEAD
from engine_service.speculation.head import HeadSource, HeadState
from engine_service.speculation.options import SpeculationOptions
from engine_service.speculation.sequence_state import SequenceState
from engine_service.speculation.stats import SpeculationStats
from tandem.lm.proposers.head import HeadProposer, HeadRun
from tandem.lm.types import Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")

# Best chance that is believed when asking whether drafts could pay at all.
_BEST_CHANCE = 0.9


class DraftSpeculation:
    """Drafts from a draft service, a head, or both. Fails open: without an answer in time there are none of it."""

    def __init__(
        self,
        client: DraftClient | NoClient,
        options: SpeculationOptions | None = None,
        epoch: int = 0,
        head: HeadProposer | None = None,
    ) -> None:
        """epoch: of the engine process; 0 draws one."""
        self._client = client
        self._options = options or SpeculationOptions()
        self._sequences: dict[int, SequenceState] = {}
        self._prior: dict[str, Acceptance] = {}
        # Whether drafts were sought in the last step.
        self._seeking = False
        self._batch = 0
        self.control = LengthControl()
        self.stats = SpeculationStats(client.stats)
        self._dialogue = Dialogue(client, self._options, epoch, self._sequences, self.stats)
        self.head = HeadSource(head, self.stats.head, self._options.max_drafts) if head is not None else None

    # What the step loop calls.

    def started(self, sequence: Sequence, salt: str) -> None:
        self._sequences[sequence.id] = SequenceState(sequence, salt)
        if self._worthwhile():
            # The draft reads the prompt while the engine does.
            self._guarded(lambda: self._dialogue.ask([]))

    def finished(self, sequence_id: int) -> None:
        state = self._sequences.pop(sequence_id, None)
        if state is not None:
            self._dialogue.farewell(state)

    def propose(self, candidates: list[SpecCandidate]) -> dict[int, Draft]:
        return self._guarded(lambda: self._propose(candidates)) or {}

    def observe(self, sequence_id: int, proposer: str, proposed: int, accepted: int, committed_ids: list[int]) -> None:
        if proposed:
            self.stats.proposer(proposer).add(proposed, accepted)
        state = self._sequences.get(sequence_id)
        if state is not None:
            if state.kept is not None and not state.kept.late and proposer == state.kept.proposer:
                state.kept.used += accepted
                state.kept.steps += proposed > 0
            self._align(state)
            if self.head is not None:
                self.head.align(state.head, state.sequence, proposed if proposer == HEAD else 0)

    def wants_hidden(self) -> bool:
        return self.head is not None and self._load <= self._options.max_batch

    def keep_hidden(self, sequence_id: int, hidden: np.ndarray) -> None:
        state = self._sequences.get(sequence_id)
        if state is not None and self.head is not None:
            self.head.keep(state.head, state.sequence, hidden)

    def step_done(self, batch_rows: int, prefill_tokens: int, step_ms: float) -> None:
        """`step_ms` contains the wait for drafts that `propose` made, and the head's time: they are taken off."""
        spent_ms = self._dialogue.take_waited_ms() + (self.head.take_spent_ms() if self.head is not None else 0.0)
        if not prefill_tokens:
            self.control.learn(batch_rows, step_ms - spent_ms)
        if self._worthwhile():
            self._guarded(self._ask_ahead)
        elif len(self._dialogue.leaving) >= MAX_LAST_WORDS:
            self._guarded(self._take_leave)

    def idle(self) -> bool:
        return bool(self._dialogue.leaving) and bool(self._guarded(self._take_leave))

    def close(self) -> None:
        self._dialogue.close()

    # How it works.

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """A bug of ours must not reach the step loop: it is counted and shown, and all answers are forgotten."""
        try:
            return work()
        except Exception:
            self.stats.errors += 1
            if self.stats.errors <= 3:
                log.exception("speculation failed: going on without drafts")
            for state in self._sequences.values():
                state.told, state.kept, state.head = 0, None, HeadState()
            return None

    @property
    def _load(self) -> int:
        """Sequences that decode, or will when their prompt is computed."""
        return max(1, self._batch, len(self._sequences))

    def _worthwhile(self) -> bool:
        """Whether drafts for the coming step are worth a question."""
        if not self._dialogue.connected or self._load > self._options.max_batch:
            return False
        return self._seeking or self.control.can_pay(self._load, _BEST_CHANCE)

    def _ask_ahead(self) -> None:
        self._absorb(0.0)
        for state in self._sequences.values():
            self._align(state)
        self._dialogue.ask([state for state in self._sequences.values() if state.kept is None])

    def _propose(self, candidates: list[SpecCandidate]) -> dict[int, Draft]:
        self._batch = len(candidates)
        for candidate in candidates:
            if candidate.sequence.id in self._sequences:
                self._sequences[candidate.sequence.id].constrained = candidate.constrained
        wishes = [
            (self._sequences[candidate.sequence.id], min(candidate.max_drafts, self._options.max_drafts))
            for candidate in candidates
            if candidate.max_drafts > 0 and candidate.sequence.id in self._sequences
        ]
        load = self._load
        self._seeking = load <= self._options.max_batch and self.control.seek(load, _BEST_CHANCE)
        if not self._seeking:
            return {}
        self._absorb(0.0)
        for state, _ in wishes:
            self._align(state)
        lacking = [state for state, _ in wishes if state.kept is None]
        if lacking and not self._dialogue.asked:
            # What is in the way is a question for others, such as one that told of a prompt.
            self._wait(lacking)
        self._dialogue.ask(lacking)
        self._wait([state for state in self._dialogue.asked if state in lacking])
        if not wishes:
            return {}
        self.stats.steps += 1
        return self._choose(wishes)

    def _choose(self, wishes: list[tuple[SequenceState, int]]) -> dict[int, Draft]:
        offers: list[Offer] = []
        others: list[tuple[SequenceState, int]] = []
        for state, most in wishes:
            chances: tuple[float, ...] = ()
            if state.kept is not None:
                chances = state.chances(most, self._prior.setdefault(state.kept.proposer, Acceptance()))
            if not chances or self._head_yield(state) > sum(itertools.accumulate(chances, operator.mul)):
                others.append((state, most))
            elif chances:
                offers.append(Offer(state.sequence.id, chances))
        runs = self._run_head(others)
        offers += [
            Offer(identity, self.head.chances(run, self._sequences[identity].head))
            for identity, run in runs.items()
            if self.head is not None and run.ids
        ]
        if self.head is not None and self.head.trying:
            lengths = {identity: len(run.ids) for identity, run in runs.items() if run.ids}
            self.control.force(self._batch)
        else:
            lengths = self.control.allocate(self._batch, offers) if offers else {}
        if lengths:
            self.stats.steps_with_drafts += 1
        return {
            identity: _head_draft(runs[identity], count)
            if identity in runs
            else self._draft(self._sequences[identity], count)
            for identity, count in lengths.items()
        }

    def _head_yield(self, state: SequenceState) -> float:
        """Tokens that the head should add to the next step of a sequence, less its cost; 0: it does not pay."""
        if self.head is None:
            return 0.0
        return self.head.yields(state.head, state.sequence, max(1, self._batch), self.control.cost)

    def _run_head(self, wishes: list[tuple[SequenceState, int]]) -> dict[int, HeadRun]:
        """Drafts of the head by sequence id."""
        if self.head is None:
            return {}
        asked = [(state.head, state.sequence, most) for state, most in wishes]
        depths = self.head.plan(asked, self._batch, self.control.cost)
        chosen = [
            (state, (state.head, state.sequence, depth))
            for (state, _), depth in zip(wishes, depths, strict=True)
            if depth > 0
        ]
        if not chosen:
            return {}
        rejection = [self._by_rejection(state) for state, _ in chosen]
        runs = self.head.draft([wish for _, wish in chosen], self._batch, self.control.cost, rejection)
        return {state.sequence.id: run for (state, _), run in zip(chosen, runs, strict=True)}

    def _by_rejection(self, state: SequenceState) -> bool:
        """A grammar cuts drafts by what they are, which rejection does not allow: such output is kept while equal."""
        return self._options.rejection and not state.sequence.params.greedy and not state.constrained

    def _draft(self, state: SequenceState, count: int) -> Draft:
        """The first `count` kept drafts, with distributions where they are to be verified by rejection."""
        kept = state.kept
        assert kept is not None
        ids = kept.ids[:count]
        if not self._by_rejection(state):
            return Draft(ids, kept.proposer)
        if kept.distributions is not None:
            return Draft(ids, kept.proposer, kept.distributions[:count])
        # A copied draft is drawn from a distribution that is certain of it.
        certain = tuple((np.array([token], np.int64), np.ones(1, np.float32)) for token in ids)
        return Draft(ids, kept.proposer, certain)

    def _align(self, state: SequenceState) -> None:
        if state.kept is not None:
            ended = state.align(self._prior.setdefault(state.kept.proposer, Acceptance()))
            if ended is not None:
                # What the head would have brought in those steps was not won by asking.
                self._ended(state, max(0.0, ended.used - ended.steps * self._head_yield(state)))

    def _ended(self, state: SequenceState, used: float) -> None:
        """An answer is used up or was of no use: was the question worth asking?"""
        pays = state.policy.gain * self.control.token_ms(max(1, self._batch)) > MESSAGE_MS
        state.policy.learn(used, pays)

    # The dialogue with the draft service.

    def _absorb(self, timeout_s: float) -> None:
        self._settle(self._dialogue.absorb(timeout_s))

    def _settle(self, absorbed: Absorbed) -> None:
        """Books an answer of the draft service."""
        for state in absorbed.answered:
            self._align(state)
        for state in absorbed.fruitless:
            self._ended(state, 0)

    def _wait(self, states: list[SequenceState]) -> None:
        """Waits for the pending answer as long as what it should bring to `states` is worth more than the wait."""
        if not states:
            return
        tokens = sum(max(0.0, min(state.policy.gain, 4.0) - self._head_yield(state)) for state in states)
        worth_ms = tokens * self.control.token_ms(self._batch)
        if self._dialogue.worth_waiting(worth_ms):
            self._settle(self._dialogue.wait(worth_ms))

    def _take_leave(self) -> bool:
        self._absorb(0.0)
        return self._dialogue.take_leave()


def _head_draft(run: HeadRun, count: int) -> Draft:
    return Draft(tuple(run.ids[:count]), HEAD, tuple(run.distributions[:count]) if run.rejection else None)


def connect(settings: object, vocab_size: int = 0, head: HeadProposer | None = None) -> SpeculationController:
    """The controller that the engine's settings ask for: none without a draft address and a head.

    Reads these settings: draft, draft_timeout_ms, draft_max_batch, max_drafts, verification, draft_stall_s.

    Raises:
        ValueError: the address is malformed.
    """
    address = getattr(settings, "draft", "")
    if not address and head is None:
        return NullSpeculation()
    defaults = SpeculationOptions()
    options = SpeculationOptions(
        timeout_ms=float(getattr(settings, "draft_timeout_ms", defaults.timeout_ms)),
        max_batch=int(getattr(settings, "draft_max_batch", defaults.max_batch)),
        max_drafts=min(MAX_DRAFTS, int(getattr(settings, "max_drafts", defaults.max_drafts))),
        rejection=getattr(settings, "verification", "exact") == "rejection",
        vocab_size=vocab_size,
        stall_s=float(getattr(settings, "draft_stall_s", defaults.stall_s)),
    )
    client = DraftClient(address, stall_s=options.stall_s) if address else NoClient()
    return DraftSpeculation(client, options, head=head)
