"""Proposers from settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draft_service.build import _TABLES, build_proposer, shipped_tables
from draft_service.settings import DraftSettings
from tandem.lm.proposers.table import TableProposer
from tandem.settings import SettingsError


def test_named_proposers_are_built_in_order() -> None:
    built = build_proposer(DraftSettings(proposers="suffix, ngram"))
    assert [proposer.name for proposer in built.proposers] == ["suffix", "ngram"]


def test_shipped_tables_load_fit_the_budget_and_have_cards() -> None:
    assert "smollm2-135m-instruct" in shipped_tables()
    for name in shipped_tables():
        table = TableProposer.load(_TABLES / f"{name}.npz")
        card = json.loads((_TABLES / f"{name}.json").read_text())
        assert table.size_bytes == card["bytes"] <= 6_000_000
        assert card["held_out_all"]["acceptance_length"] > 1.2
        assert build_proposer(DraftSettings(proposers="table", table=name)).proposers[0].name == "table"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"proposers": "table"}, "shipped: smollm2"),
        ({"proposers": "table", "table": "/nonexistent.npz"}, "cannot be read"),
        ({"proposers": "model"}, "--model names none"),
    ],
)
def test_a_proposer_without_what_it_needs_is_refused(fields: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        build_proposer(DraftSettings(**fields))  # type: ignore[arg-type]


def test_a_store_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.write_text("not json\n")
    with pytest.raises(SettingsError, match="line 1"):
        build_proposer(DraftSettings(suffix_store=str(path)))
