"""The engine's side of the talk with a draft service: what it was told and asked, and what it answered.

One question for the whole batch at a time. It carries what was committed since the last one and who is gone; a draft
that forgot (a new connection or epoch, a sequence out of step) is told anew.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass, field

from engine_service.speculation import MAX_DRAFTS
from engine_service.speculation.client import DraftClient, NoClient
from engine_service.speculation.options import SpeculationOptions
from engine_service.speculation.proposal import checked
from engine_service.speculation.sequence_state import SequenceState, sampling_message
from engine_service.speculation.stats import SpeculationStats
from tandem.draft.v1 import draft_pb2 as pb

log = logging.getLogger(__name__)

# What a question costs the engine even if nobody waits for it: the draft and the reader need a core for a moment.
MESSAGE_MS = 0.3
# Ended sequences whose last tokens wait for the next question, so that the draft learns whole outputs.
MAX_LAST_WORDS = 64
# A sequence that the draft loses more often gets no further drafts.
_MAX_RESYNCS = 4


@dataclass(slots=True)
class Absorbed:
    """Sequences that an answer brought drafts for, and those that it was asked for in vain."""

    answered: list[SequenceState] = field(default_factory=list)
    fruitless: list[SequenceState] = field(default_factory=list)


class Dialogue:
    """All calls come from the step thread; only `wait` and `absorb` may take time, and no longer than told."""

    def __init__(
        self,
        client: DraftClient | NoClient,
        options: SpeculationOptions,
        epoch: int,
        sequences: dict[int, SequenceState],
        stats: SpeculationStats,
    ) -> None:
        """sequences: those of the controller, by id, which it adds and removes. epoch: of the engine; 0 draws one."""
        self._client = client
        self._options = options
        self._epoch = epoch or secrets.randbits(64) or 1
        self._sequences = sequences
        self._stats = stats
        self._draft_epoch = 0
        self._generation = 0
        # What is still to be said of sequences that are gone: last tokens, or the id.
        self.leaving: list[pb.SequenceUpdate | int] = []
        # Sequences that the pending question is about.
        self.asked: list[SequenceState] = []
        # The question, by count, whose answer was last waited for.
        self._waited_for = 0
        self._waited_ms = 0.0

    @property
    def connected(self) -> bool:
        return self._client.connected

    def take_waited_ms(self) -> float:
        """Milliseconds waited since this was last called."""
        waited, self._waited_ms = self._waited_ms, 0.0
        return waited

    def farewell(self, state: SequenceState) -> None:
        """A sequence is gone: the draft is told with the next question, its last tokens included."""
        if not state.told:
            return
        if state.told < state.length and len(self.leaving) < 2 * MAX_LAST_WORDS:
            self.leaving.append(state.update(0))
        self.leaving.append(state.sequence.id)

    def ask(self, lacking: list[SequenceState]) -> None:
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
            self.asked = due
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

    def take_leave(self) -> bool:
        """Tells which sequences are gone, though nothing is to be asked. True if the draft cannot be told yet."""
        self._follow_generation()
        if self.leaving and self._client.idle and not self._client.ask(self._question()):
            self._forget()
        return bool(self.leaving) and self._client.connected

    def _say_farewell(self, question: pb.ProposeRequest) -> None:
        for item in self.leaving:
            if isinstance(item, int):
                question.finished.append(item)
            else:
                question.sequences.append(item)
        self.leaving.clear()

    def _follow_generation(self) -> None:
        """A new connection: the other side knows nothing."""
        if self._generation != self._client.generation:
            self._generation = self._client.generation
            self._draft_epoch = 0
            self._forget()

    def _forget(self) -> None:
        """Everything must be told anew. Drafts at hand stay: they are compared with what is committed, nothing else."""
        self.leaving.clear()
        self.asked = []
        for state in self._sequences.values():
            state.told = 0

    def worth_waiting(self, worth_ms: float) -> bool:
        """Whether to wait for the pending answer, if what it should bring is worth so many milliseconds. Nobody waits
        twice for one answer."""
        if self._client.idle or self._waited_for == self._client.stats.questions:
            return False
        return worth_ms > max(self._client.remaining_ms(), MESSAGE_MS)

    def wait(self, worth_ms: float) -> Absorbed:
        """Waits for the pending answer, at most as long as it is worth and the options allow."""
        self._waited_for = self._client.stats.questions
        began = time.perf_counter()
        absorbed = self.absorb(min(self._options.timeout_ms, worth_ms) / 1000)
        waited_ms = (time.perf_counter() - began) * 1e3
        self._waited_ms += waited_ms
        self._stats.waited_us += waited_ms * 1e3
        return absorbed

    def absorb(self, timeout_s: float) -> Absorbed:
        """Takes in the answer, waiting at most so long."""
        absorbed = Absorbed()
        answer = self._client.take(timeout_s)
        if answer is None:
            return absorbed
        self._follow_generation()
        if self._draft_epoch not in (0, answer.draft_epoch):
            # Another process speaks: whatever it says is about nothing that we told it.
            self._stats.stale += len(answer.proposals)
            self._draft_epoch = 0
            self._forget()
            self._client.break_off("draft changed its epoch in mid-stream")
            return absorbed
        self._draft_epoch = answer.draft_epoch
        unanswered = {state.sequence.id: state for state in self.asked if state.sequence.id in self._sequences}
        self.asked = []
        for proposal in answer.proposals:
            state = self._sequences.get(proposal.id)
            if state is None:
                continue
            if proposal.status == pb.PROPOSAL_STATUS_RESYNC:
                self._stats.resyncs += 1
                state.told, state.asked_at = 0, -1
                state.resyncs += 1
                # One who loses the thread again and again would be told the whole prompt each time.
                state.refused = state.resyncs > _MAX_RESYNCS
                unanswered.pop(proposal.id, None)
            elif proposal.status == pb.PROPOSAL_STATUS_BAD:
                self._stats.bad += 1
                state.refused = True
                log.warning("draft refused a sequence", extra={"detail": proposal.detail[:200]})
            elif proposal.id in unanswered and self._receive(state, proposal):
                absorbed.answered.append(unanswered.pop(proposal.id))
        absorbed.fruitless += unanswered.values()
        return absorbed

    def _receive(self, state: SequenceState, proposal: pb.Proposal) -> bool:
        """Keeps the proposal if it is well-formed and fits; False if it is of no use."""
        kept = checked(proposal, self._options.vocab_size)
        if kept is None:
            self._stats.bad += 1
            return False
        if kept.base != state.asked_at:
            self._stats.stale += 1
            return False
        kept.late = kept.base < state.length
        state.kept = kept
        return True

    def close(self) -> None:
        self._client.close()
