"""Proposers: they guess the next tokens of a sequence. Those that copy need no torch."""

from tandem.lm.proposers.base import MAX_DRAFTS, DraftSampling, DraftSequence, Guess, Proposer
from tandem.lm.proposers.combined import CombinedProposer
from tandem.lm.proposers.ngram import NgramProposer
from tandem.lm.proposers.suffix import SuffixProposer

__all__ = [
    "MAX_DRAFTS",
    "CombinedProposer",
    "DraftSampling",
    "DraftSequence",
    "Guess",
    "NgramProposer",
    "Proposer",
    "SuffixProposer",
]
