"""Builds the proposers that the settings name. Torch is imported only for a model."""

from __future__ import annotations

from draft_service.settings import DraftSettings
from tandem.lm.proposers import CombinedProposer, NgramProposer, Proposer, SuffixProposer
from tandem.settings import SettingsError


def build_proposer(settings: DraftSettings) -> CombinedProposer:
    """Raises SettingsError when a proposer lacks what it needs."""
    return CombinedProposer([_build(name, settings) for name in settings.proposer_names])


def _build(name: str, settings: DraftSettings) -> Proposer:
    if name == "ngram":
        return NgramProposer(tuple(int(part) for part in settings.ngram_lengths.split(",")))
    if name == "suffix":
        return SuffixProposer(min_match=settings.suffix_min_match, max_store_tokens=settings.suffix_store_tokens)
    raise SettingsError(f"--proposers {name}: not available in this version")
