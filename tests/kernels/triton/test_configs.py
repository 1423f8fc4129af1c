"""Tile tables: shipped files, fall-backs, and tiles tuned on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from kernels.triton import configs
from kernels.triton.configs import ConfigError, Tile, names, save_tiles, tile


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    configs._table.cache_clear()
    yield
    configs._table.cache_clear()


def test_every_shipped_entry_is_known_to_the_default() -> None:
    assert {"default", "sm_80", "sm_90"} <= set(names())
    known = set(configs._table("default"))
    for name in names():
        assert set(configs._table(name)) <= known, name


def test_unknown_targets_and_missing_entries_fall_back() -> None:
    default = tile(None, "attention", "decode-128")
    assert tile("sm_75", "attention", "decode-128") == default
    assert tile("sm_90", "linear", "fp32") == tile(None, "linear", "fp32")
    with pytest.raises(ConfigError, match="attention/decode-512"):
        tile("sm_90", "attention", "decode-512")


def test_tuned_tiles_come_first_and_last(tmp_path: Path) -> None:
    mine = Tile(32, 64, 64, 8, 4)
    shipped = configs.digest("sm_90")
    assert tile("sm_90", "linear", "bf16") != mine
    path = save_tiles("sm_90", {"linear/bf16": mine})
    assert path.is_relative_to(tmp_path) and tile("sm_90", "linear", "bf16") == mine
    assert configs.digest("sm_90") != shipped != configs.digest("sm_80")
    save_tiles("sm_90", {"linear/int8": mine})
    assert tile("sm_90", "linear", "bf16") == mine and tile("sm_80", "linear", "bf16") != mine
    path.write_text('{"tiles": {"linear/bf16": {"block": 3}}}')
    configs._table.cache_clear()
    with pytest.raises(ConfigError, match="sm_90"):
        tile("sm_90", "linear", "bf16")
