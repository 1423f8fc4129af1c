"""State of one engine's Propose stream: its sequences, checked against every message."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from tandem.draft.v1 import draft_pb2 as pb
from tandem.lm.proposers import MAX_DRAFTS, DraftSampling, DraftSequence, Guess, Proposer

log = logging.getLogger(__name__)

_OK = pb.PROPOSAL_STATUS_OK
_RESYNC = pb.PROPOSAL_STATUS_RESYNC
_BAD = pb.PROPOSAL_STATUS_BAD
_MAX_DETAIL = 200


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what one engine may make the draft hold."""

    max_sequences: int = 1024
    max_sequence_tokens: int = 131_072


class _Refused(Exception):
    """A malformed update; the message is for people."""


class Session:
    """Answers questions in order. What is wrong with one sequence is answered for that sequence alone."""

    def __init__(self, proposer: Proposer, epoch: int, limits: Limits | None = None) -> None:
        self._proposer = proposer
        self._epoch = epoch
        self._limits = limits or Limits()
        self._engine_epoch = 0
        self._sequences: dict[int, DraftSequence] = {}
        self._leaving: list[tuple[DraftSequence, bool]] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def answer(self, question: pb.ProposeRequest) -> pb.ProposeResponse:
        """Never raises. Call `tidy` when the answer is on its way."""
        began = time.perf_counter()
        self._check_epochs(question)
        response = pb.ProposeResponse(step=question.step, draft_epoch=self._epoch)
        wants: list[tuple[DraftSequence, int]] = []
        seen: set[int] = set()
        for update in question.sequences:
            try:
                if update.id in seen:
                    raise _Refused(f"sequence {update.id} appears twice in one question")
                seen.add(update.id)
                sequence = self._apply(update)
            except _Refused as error:
                self._drop(update.id)
                self._reply(response, update.id, _BAD, detail=str(error))
                continue
            except Exception as error:
                log.exception("a proposer failed on an update")
                self._drop(update.id)
                self._reply(response, update.id, _BAD, detail=f"{type(error).__name__}: {error}")
                continue
            if sequence is None:
                self._reply(response, update.id, _RESYNC)
            elif update.want:
                wants.append((sequence, update.want))
        # A sequence that was refused further down in the same message wants nothing.
        wants = [(sequence, count) for sequence, count in wants if self._sequences.get(sequence.id) is sequence]
        self._propose(wants, response)
        for identity in question.finished:
            sequence = self._sequences.pop(identity, None)
            if sequence is not None:
                self._leaving.append((sequence, not sequence.no_store))
        response.elapsed_us = int((time.perf_counter() - began) * 1e6)
        return response

    def tidy(self) -> None:
        """Work that no answer waits for: finished sequences are learnt from and forgotten."""
        leaving, self._leaving = self._leaving, []
        for sequence, completed in leaving:
            try:
                self._proposer.finish(sequence, completed)
            except Exception:
                log.exception("a proposer failed on a finished sequence")

    def close(self) -> None:
        """The stream ended: nothing of it is kept. Cut-off sequences are not learnt from."""
        self._leaving += [(sequence, False) for sequence in self._sequences.values()]
        self._sequences.clear()
        self.tidy()

    def _check_epochs(self, question: pb.ProposeRequest) -> None:
        changed = self._engine_epoch not in (0, question.engine_epoch)
        stale = question.draft_epoch not in (0, self._epoch)
        if changed or stale:
            for identity in list(self._sequences):
                self._drop(identity)
        self._engine_epoch = question.engine_epoch

    def _apply(self, update: pb.SequenceUpdate) -> DraftSequence | None:
        """Brings a sequence up to date; None: its base is unknown. Raises _Refused."""
        if update.want > MAX_DRAFTS:
            raise _Refused(f"want is {update.want}, but the most is {MAX_DRAFTS}")
        known = self._sequences.get(update.id)
        if update.base_len == 0:
            if known is not None:
                self._drop(update.id)
            known = self._start(update)
        elif known is None or len(known.tokens) != update.base_len:
            self._drop(update.id)
            return None
        size = update.base_len + len(update.new_ids)
        if size > self._limits.max_sequence_tokens:
            raise _Refused(f"sequence has {size} tokens, but the most held is {self._limits.max_sequence_tokens}")
        if update.HasField("sampling"):
            known.sampling = _sampling(update.sampling)
        if update.new_ids:
            known.tokens.extend(update.new_ids)
            self._proposer.extend(known, update.base_len)
        return known

    def _start(self, update: pb.SequenceUpdate) -> DraftSequence:
        if not update.new_ids:
            raise _Refused("base_len is 0 but there are no new_ids")
        if update.prompt_len > len(update.new_ids):
            raise _Refused(f"prompt_len is {update.prompt_len}, but only {len(update.new_ids)} tokens came")
        if len(self._sequences) >= self._limits.max_sequences:
            raise _Refused(f"{len(self._sequences)} sequences are held, the most allowed")
        sequence = DraftSequence(
            id=update.id,
            tokens=[],
            prompt_len=update.prompt_len,
            salt=update.salt,
            allowed=tuple(update.proposers),
            no_store=update.no_store,
        )
        self._sequences[update.id] = sequence
        self._proposer.start(sequence)
        return sequence

    def _propose(self, wants: list[tuple[DraftSequence, int]], response: pb.ProposeResponse) -> None:
        if not wants:
            return
        try:
            guesses = self._proposer.propose(wants)
        except Exception:
            log.exception("a proposer failed; trying each sequence alone")
            guesses = [self._propose_alone(want, response) for want in wants]
        for (sequence, count), guess in zip(wants, guesses, strict=True):
            if not guess.ids:
                continue
            proposal = self._reply(response, sequence.id, _OK)
            proposal.base_len = len(sequence.tokens)
            proposal.draft_ids.extend(guess.ids[:count])
            proposal.proposer = guess.proposer
            proposal.confidence = guess.confidence
            for ids, probabilities in (guess.distributions or ())[:count]:
                proposal.distributions.add(ids=ids, probabilities=probabilities)

    def _propose_alone(self, want: tuple[DraftSequence, int], response: pb.ProposeResponse) -> Guess:
        try:
            return self._proposer.propose([want])[0]
        except Exception as error:
            self._drop(want[0].id)
            self._reply(response, want[0].id, _BAD, detail=f"{type(error).__name__}: {error}")
            return Guess()

    def _reply(self, response: pb.ProposeResponse, identity: int, status: int, detail: str = "") -> pb.Proposal:
        return response.proposals.add(id=identity, status=status, detail=detail[:_MAX_DETAIL])  # type: ignore[arg-type]

    def _drop(self, identity: int) -> None:
        sequence = self._sequences.pop(identity, None)
        if sequence is not None:
            self._leaving.append((sequence, False))


def _sampling(message: pb.DraftSampling) -> DraftSampling:
    return DraftSampling(
        seed=message.seed,
        choice=message.choice,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        want_distribution=message.want_distribution,
    )
