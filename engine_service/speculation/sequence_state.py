"""What the engine knows about one sequence in the eyes of the draft: what was told, and which drafts are at hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine_service.speculation.control import Acceptance, AskPolicy
from engine_service.speculation.head import HeadState
from tandem.draft.v1 import draft_pb2 as pb
from tandem.lm.types import SamplingParams, Sequence

SparseDistribution = tuple[np.ndarray, np.ndarray]


@dataclass(slots=True)
class Kept:
    """The part of an answer that still agrees with what was committed: drafts for positions from `base` on."""

    base: int
    ids: tuple[int, ...]
    proposer: str
    confidence: float = 0.0
    distributions: tuple[SparseDistribution, ...] | None = None
    # No draft of the answer has been compared yet.
    fresh: bool = True
    # What asking was good for: drafts that were run and accepted; for a late answer those that came true, because
    # waiting for it would have brought them.
    used: int = 0
    late: bool = False
    # Steps that ran its drafts.
    steps: int = 0


@dataclass(slots=True)
class SequenceState:
    """One tracked sequence. Drafts are kept while they equal what is committed, whoever committed it."""

    sequence: Sequence
    salt: str
    # Committed tokens that the draft has been told; 0: it must be told everything.
    told: int = 0
    kept: Kept | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    policy: AskPolicy = field(default_factory=AskPolicy)
    head: HeadState = field(default_factory=HeadState)
    # The draft refused it: never ask again.
    refused: bool = False
    # A grammar rules its output.
    constrained: bool = False
    resyncs: int = 0
    # Length at which the last question was asked, and at which the policy last counted a step.
    asked_at: int = -1
    counted_at: int = -1

    @property
    def length(self) -> int:
        return len(self.sequence.token_ids)

    def due(self) -> bool:
        """Whether to ask for drafts that follow the present tokens; counts each length once."""
        if self.refused or self.asked_at == self.length or not self.sequence.output_len:
            return False
        if self.counted_at != self.length:
            self.counted_at = self.length
            self.policy.skip()
        return self.policy.ripe

    def align(self, prior: Acceptance) -> Kept | None:
        """Compares the kept drafts with what was committed since, and learns from it, also for all sequences (`prior`).

        Returns the answer that ended now, if one did.
        """
        kept, tokens = self.kept, self.sequence.token_ids
        if kept is None or kept.base >= len(tokens):
            return None
        agreed = 0
        for mine, theirs in zip(kept.ids, tokens[kept.base : kept.base + len(kept.ids)], strict=False):
            if mine != theirs:
                break
            agreed += 1
        failed = agreed < min(len(kept.ids), len(tokens) - kept.base)
        for acceptance in (self.acceptance, prior):
            acceptance.learn(kept.fresh, agreed, failed, kept.confidence)
        kept.fresh = False
        if kept.late:
            kept.used += agreed
        if failed or agreed == len(kept.ids):
            self.kept = None
            return kept
        kept.base += agreed
        kept.ids = kept.ids[agreed:]
        if kept.distributions is not None:
            kept.distributions = kept.distributions[agreed:]
        return None

    def update(self, want: int) -> pb.SequenceUpdate:
        """The message that brings the draft up to date, and counts as told."""
        tokens = self.sequence.token_ids
        message = pb.SequenceUpdate(id=self.sequence.id, base_len=self.told, new_ids=tokens[self.told :], want=want)
        if self.told == 0:
            message.prompt_len = self.sequence.prompt_len
            message.salt = self.salt
            message.traceparent = self.sequence.trace
            message.no_store = self.sequence.no_store
            message.sampling.CopyFrom(sampling_message(self.sequence.params, self.sequence.choice))
        self.told = len(tokens)
        if want:
            self.asked_at = len(tokens)
            self.policy.asked()
        return message

    def chances(self, most: int, prior: Acceptance) -> tuple[float, ...]:
        """Chance of each of the first `most` kept drafts, given those before it."""
        if self.kept is None or most <= 0:
            return ()
        following = self.acceptance.following(prior.following(0.7))
        first = following
        if self.kept.fresh:
            claimed = self.kept.confidence
            first = self.acceptance.first_given(claimed) if claimed > 0 else self.acceptance.first(prior.first(0.5))
        count = min(most, len(self.kept.ids))
        return (first,) + (following,) * (count - 1)


def sampling_message(params: SamplingParams, choice: int, want_distribution: bool = False) -> pb.DraftSampling:
    """How the engine will sample, for coupled drafts."""
    return pb.DraftSampling(
        seed=params.seed & 0xFFFF_FFFF_FFFF_FFFF,
        choice=choice,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        logit_bias=dict(params.logit_bias),
        want_distribution=want_distribution,
    )
