"""A cache folder for one run of the tests: what comes from fixtures stays out of the user's own.

Models and their packed weights are shared with the user's cache both ways, and so is what derives from the models'
files (their indexes and tokenizers): else every run would download or parse for seconds.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from tandem.paths import cache_dir, file_key, write_atomically

# Folders whose entries are named by content or by model, and those whose entries are named by a file's path and time.
SHARED = ("models", "tiles")
DERIVED = ("gguf", "tokenizers")


def _keys(models: Path) -> list[str]:
    return [file_key(path) for path in models.rglob("*.gguf")]


def use_own_cache() -> Path:
    """Points TANDEM_CACHE_DIR, also of processes that tests start, to a new folder, which goes at exit."""
    users = cache_dir()
    ours = Path(tempfile.mkdtemp(prefix="tandem-tests-"))
    for name in SHARED:
        (users / name).mkdir(parents=True, exist_ok=True)
        (ours / name).symlink_to(users / name)
    for name in DERIVED:
        (ours / name).mkdir()
        for key in _keys(users / "models"):
            for entry in (users / name).glob(f"{key}-*"):
                shutil.copy(entry, ours / name)
    os.environ["TANDEM_CACHE_DIR"] = str(ours)
    owner = os.getpid()

    def finish() -> None:
        # A fork of this process, such as a worker, ends earlier.
        if os.getpid() == owner:
            give_back(ours, users)
            shutil.rmtree(ours, ignore_errors=True)

    atexit.register(finish)
    return ours


def give_back(ours: Path, users: Path) -> None:
    """Adds to the user's cache what was derived from its models while the tests ran."""
    for name in DERIVED:
        for key in _keys(users / "models"):
            for entry in (ours / name).glob(f"{key}-*"):
                if not (users / name / entry.name).exists():
                    write_atomically(users / name / entry.name, entry.read_bytes())
