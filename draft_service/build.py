"""Builds the proposers that the settings name. Torch is imported only for a model."""

from __future__ import annotations

from pathlib import Path

from draft_service.settings import DraftSettings
from tandem.lm.proposers import CombinedProposer, NgramProposer, Proposer, SuffixProposer
from tandem.lm.proposers.suffix_file import SuffixFile
from tandem.settings import SettingsError

# Tables that come with the service, each with its card.
_TABLES = Path(__file__).parent / "tables"


def shipped_tables() -> list[str]:
    """Names for --table, each that of the target it was trained for."""
    return sorted(path.stem for path in _TABLES.glob("*.npz"))


def build_proposer(settings: DraftSettings) -> CombinedProposer:
    """Raises SettingsError when a proposer lacks what it needs."""
    return CombinedProposer([_build(name, settings) for name in settings.proposer_names])


def _build(name: str, settings: DraftSettings) -> Proposer:
    if name == "ngram":
        return NgramProposer(tuple(int(part) for part in settings.ngram_lengths.split(",")))
    if name == "suffix":
        return _suffix(settings)
    if name == "table":
        return _table(settings)
    return _model(settings)


def _suffix(settings: DraftSettings) -> Proposer:
    store = SuffixFile(Path(settings.suffix_store), settings.suffix_store_tokens) if settings.suffix_store else None
    try:
        return SuffixProposer(settings.suffix_min_match, max_store_tokens=settings.suffix_store_tokens, store=store)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--suffix-store {settings.suffix_store}: {error}") from error


def _table(settings: DraftSettings) -> Proposer:
    from tandem.lm.proposers.table import TableError, TableProposer

    if not settings.table:
        raise SettingsError(f"--proposers names table, but --table names none; shipped: {', '.join(shipped_tables())}")
    path = _TABLES / f"{settings.table}.npz" if settings.table in shipped_tables() else Path(settings.table)
    try:
        return TableProposer.load(path)
    except TableError as error:
        raise SettingsError(f"--table {settings.table}: {error}") from error


def _model(settings: DraftSettings) -> Proposer:
    if not settings.model:
        raise SettingsError("--proposers names model, but --model names none")
    from tandem.lm.proposers.model import ModelProposer
    from tandem.lm.runner import load_runner
    from tandem.lm.runner_settings import RunnerSettings
    from tandem.models.store import resolve

    path = resolve(settings.model).path
    runner = load_runner(
        RunnerSettings(path, threads=settings.threads, kv_cache_bytes=settings.model_kv_bytes, max_num_seqs=64)
    )
    return ModelProposer(runner, settings.model_drafts)
