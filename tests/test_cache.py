"""Tests leave the user's cache as it was, but share its models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.models.store import resolve
from tandem.paths import cache_dir, file_key
from tests.cache import give_back, use_own_cache


def test_the_cache_of_tests_is_their_own_and_its_models_are_the_users() -> None:
    ours = cache_dir()
    assert ours.name.startswith("tandem-tests-") and ours != Path.home() / ".cache" / "tandem"
    model = resolve("smollm2-135m-instruct").path
    assert not model.resolve().is_relative_to(ours), "the model would go with the tests' folder"


def test_only_what_derives_from_models_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = tmp_path / "users"
    (users / "models" / "m").mkdir(parents=True)
    model, fixture = users / "models" / "m" / "m.gguf", tmp_path / "fixture.gguf"
    for path in (model, fixture):
        path.write_bytes(b"GGUF")
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(users))
    ours = use_own_cache()
    assert os.environ["TANDEM_CACHE_DIR"] == str(ours)
    for path in (model, fixture):
        (ours / "gguf" / f"{file_key(path)}-v1.json").write_text("{}")
    give_back(ours, users)
    assert [entry.name for entry in (users / "gguf").iterdir()] == [f"{file_key(model)}-v1.json"]
