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
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from engine_service.speculation import MAX_DRAFTS, Draft, NullSpeculation, SpecCandidate, SpeculationController
from engine_service.speculation.client import DraftClient, NoClient
from engine_service.speculation.control import Acceptance, LengthControl, Offer
from engine_service.speculation.head import NAME as HEAD
from engine_service.speculation.head import HeadSource, HeadState
from engine_service.speculation.sequence_state import Kept, SequenceState, sampling_message
from engine_service.speculation.stats import SpeculationStats
from tandem.draft.v1 import draft_pb2 as pb
from tandem.lm.proposers.head import HeadProposer, HeadRun
from tandem.lm.types import Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")

# Best chance that is believed when asking whether drafts could pay at all.
_BEST_CHANCE = 0.9
# What a question costs the engine even if nobody waits for it: the draft and the reader need a core for a moment.
_MESSAGE_MS = 0.3
# Ended sequences whose last tokens wait for the next question, so that the draft learns whole outputs.
_MAX_LAST_WORDS = 64
# A sequence that the draft loses more often gets no further drafts.
_MAX_RESYNCS = 4


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What the engine's settings say about speculation."""

    # Longest wait for an answer before a step, milliseconds.
    timeout_ms: float = 2.0
    # With more decoding sequences no draft is sought.
    max_batch: int = 16
    # Most drafts per sequence and step.
    max_drafts: int = 16
    # Verify sampled rows by rejection (Leviathan/Chen) instead of keep-while-equal.
    rejection: bool = False
    # Ids at or above this are no tokens; 0: unknown, not checked.
    vocab_size: int = 0
    # A question unanswered for longer breaks the connection off, seconds.
    stall_s: float = 1.0
    # Proposers allowed, in order of preference; empty: all.
    proposers: tuple[str, ...] = ()


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
        self._epoch = epoch or secrets.randbits(64) or 1
        self._draft_epoch = 0
        self._generation = 0
        self._sequences: dict[int, SequenceState] = {}
        self._leaving: list[pb.SequenceUpdate | int] = []
        self._prior: dict[str, Acceptance] = {}
        self._asked: list[SequenceState] = []
        # Whether drafts were sought in the last step.
        self._seeking = False
        self._batch = 0
        # The question, by count, whose answer was last waited for.
        self._waited_for = 0
        self._waited_ms = 0.0
        self.control = LengthControl()
        self.stats = SpeculationStats(client.stats)
        self.head = HeadSource(head, self.stats.head, self._options.max_drafts) if head is not None else None

    # What the step loop calls.

    def started(self, sequence: Sequence, salt: str) -> None:
        self._sequences[sequence.id] = SequenceState(sequence, salt)
        if self._worthwhile():
            # The draft reads the prompt while the engine does.
            self._guarded(lambda: self._ask([]))

    def finished(self, sequence_id: int) -> None:
        state = self._sequences.pop(sequence_id, None)
        if state is None or not state.told:
            return
        if state.told < state.length and len(self._leaving) < 2 * _MAX_LAST_WORDS:
            self._leaving.append(state.update(0))
        self._leaving.append(sequence_id)

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
        spent_ms = self._waited_ms + (self.head.take_spent_ms() if self.head is not None else 0.0)
        if not prefill_tokens:
            self.control.learn(batch_rows, step_ms - spent_ms)
        self._waited_ms = 0.0
        if self._worthwhile():
            self._guarded(self._ask_ahead)
        elif len(self._leaving) >= _MAX_LAST_WORDS:
            self._guarded(self._take_leave)

    def idle(self) -> bool:
        return bool(self._leaving) and bool(self._guarded(self._take_leave))

    def close(self) -> None:
        self._client.close()

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
        if not self._client.connected or self._load > self._options.max_batch:
            return False
        return self._seeking or self.control.can_pay(self._load, _BEST_CHANCE)

    def _ask_ahead(self) -> None:
        self._absorb(0.0)
        for state in self._sequences.values():
            self._align(state)
        self._ask([state for state in self._sequences.values() if state.kept is None])

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
        if lacking and not self._asked:
            # What is in the way is a question for others, such as one that told of a prompt.
            self._wait(lacking)
        self._ask(lacking)
        self._wait([state for state in self._asked if state in lacking])
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
        pays = state.policy.gain * self.control.token_ms(max(1, self._batch)) > _MESSAGE_MS
        state.policy.learn(used, pays)

    # Questions and answers.

    def _ask(self, lacking: list[SequenceState]) -> None:
        """Sends one question for all sequences without drafts that are due, if the one before was answered."""
        if not self._client.idle:
            return
        self._follow_generation()
        due = [state for state in lacking if state.due()]
        fresh = [state for state in self._sequences.values() if not state.told and not state.refused]
        if not due and not fresh:
            return
        question = self._question()
        for state in due:
            question.sequences.append(self._update(state, MAX_DRAFTS))
        for state in fresh:
            if not state.told:
                # A prompt that still waits or prefills: the draft can read it meanwhile.
                question.sequences.append(self._update(state, 0))
        if self._client.ask(question):
            self._asked = due
        else:
            # The connection broke just now: what was told never arrived.
            self._forget()

    def _update(self, state: SequenceState, want: int) -> pb.SequenceUpdate:
        new = not state.told
        message = state.update(want)
        if new:
            message.proposers.extend(self._options.proposers)
            if self._options.rejection:
                sampling = sampling_message(state.sequence.params, state.sequence.choice, want_distribution=True)
                message.sampling.CopyFrom(sampling)
        return message

    def _question(self) -> pb.ProposeRequest:
        """An empty question that tells which sequences are gone."""
        question = pb.ProposeRequest(
            engine_epoch=self._epoch,
            draft_epoch=self._draft_epoch,
            deadline_us=int(self._options.timeout_ms * 1000),
        )
        self._say_farewell(question)
        return question

    def _take_leave(self) -> bool:
        """Tells which sequences are gone, though nothing is to be asked. True if the draft cannot be told yet."""
        self._absorb(0.0)
        self._follow_generation()
        if self._leaving and self._client.idle and not self._client.ask(self._question()):
            self._forget()
        return bool(self._leaving) and self._client.connected

    def _say_farewell(self, question: pb.ProposeRequest) -> None:
        for item in self._leaving:
            if isinstance(item, int):
                question.finished.append(item)
            else:
                question.sequences.append(item)
        self._leaving.clear()

    def _follow_generation(self) -> None:
        """A new connection: the other side knows nothing."""
        if self._generation != self._client.generation:
            self._generation = self._client.generation
            self._draft_epoch = 0
            self._forget()

    def _forget(self) -> None:
        """Everything must be told anew. Drafts at hand stay: they are compared with what is committed, nothing else."""
        self._leaving.clear()
        self._asked = []
        for state in self._sequences.values():
            state.told = 0

    def _wait(self, states: list[SequenceState]) -> None:
        """Waits for the pending answer as long as what it should bring to `states` is worth more than the wait."""
        if not states or self._client.idle or self._waited_for == self._client.stats.questions:
            return
        tokens = sum(max(0.0, min(state.policy.gain, 4.0) - self._head_yield(state)) for state in states)
        worth = tokens * self.control.token_ms(self._batch)
        if worth <= max(self._client.remaining_ms(), _MESSAGE_MS):
            return
        # Nobody waits twice for one answer.
        self._waited_for = self._client.stats.questions
        began = time.perf_counter()
        self._absorb(min(self._options.timeout_ms, worth) / 1000)
        self._waited_ms += (time.perf_counter() - began) * 1e3
        self.stats.waited_us += self._waited_ms * 1e3

    def _absorb(self, timeout_s: float) -> None:
        answer = self._client.take(timeout_s)
        if answer is None:
            return
        self._follow_generation()
        if self._draft_epoch not in (0, answer.draft_epoch):
            # Another process speaks: whatever it says is about nothing that we told it.
            self.stats.stale += len(answer.proposals)
            self._draft_epoch = 0
            self._forget()
            self._client.break_off("draft changed its epoch in mid-stream")
            return
        self._draft_epoch = answer.draft_epoch
        unanswered = {state.sequence.id: state for state in self._asked if state.sequence.id in self._sequences}
        self._asked = []
        for proposal in answer.proposals:
            state = self._sequences.get(proposal.id)
            if state is None:
                continue
            if proposal.status == pb.PROPOSAL_STATUS_RESYNC:
                self.stats.resyncs += 1
                state.told, state.asked_at = 0, -1
                state.resyncs += 1
                # One who loses the thread again and again would be told the whole prompt each time.
                state.refused = state.resyncs > _MAX_RESYNCS
                unanswered.pop(proposal.id, None)
            elif proposal.status == pb.PROPOSAL_STATUS_BAD:
                self.stats.bad += 1
                state.refused = True
                log.warning("draft refused a sequence", extra={"detail": proposal.detail[:200]})
            elif proposal.id in unanswered and self._receive(state, proposal):
                unanswered.pop(proposal.id)
        for state in unanswered.values():
            self._ended(state, 0)

    def _receive(self, state: SequenceState, proposal: pb.Proposal) -> bool:
        """Keeps the proposal if it is well-formed and fits; False if it is of no use."""
        kept = self._checked(proposal)
        if kept is None:
            self.stats.bad += 1
            return False
        if kept.base != state.asked_at:
            self.stats.stale += 1
            return False
        kept.late = kept.base < state.length
        state.kept = kept
        self._align(state)
        return True

    def _checked(self, proposal: pb.Proposal) -> Kept | None:
        """The proposal as something to keep; None if it is malformed."""
        ids = tuple(proposal.draft_ids)
        vocab = self._options.vocab_size
        if proposal.status != pb.PROPOSAL_STATUS_OK:
            return None
        if not 0 < len(ids) <= MAX_DRAFTS or (vocab and max(ids) >= vocab):
            return None
        distributions = None
        if proposal.distributions:
            distributions = _distributions(proposal, vocab)
            if distributions is None:
                return None
        confidence = proposal.confidence if 0.0 <= proposal.confidence <= 1.0 else 0.0
        return Kept(proposal.base_len, ids, proposal.proposer[:32], confidence, distributions)


def _head_draft(run: HeadRun, count: int) -> Draft:
    return Draft(tuple(run.ids[:count]), HEAD, tuple(run.distributions[:count]) if run.rejection else None)


def _distributions(proposal: pb.Proposal, vocab: int) -> tuple[tuple[np.ndarray, np.ndarray], ...] | None:
    """Each draft's sparse distribution: int64 ids and fp32 probabilities that sum to 1. None if any is malformed."""
    if len(proposal.distributions) != len(proposal.draft_ids):
        return None
    result = []
    for token, entry in zip(proposal.draft_ids, proposal.distributions, strict=True):
        ids, chances = np.array(entry.ids, np.int64), np.array(entry.probabilities, np.float32)
        if (
            ids.size == 0
            or ids.size != chances.size
            or np.unique(ids).size != ids.size
            or (vocab and ids.max() >= vocab)
        ):
            return None
        if not np.isfinite(chances).all() or (chances < 0).any() or abs(float(chances.sum()) - 1) > 1e-3:
            return None
        if not (chances[ids == token] > 0).any():
            return None
        result.append((ids, chances / chances.sum()))
    return tuple(result)


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
