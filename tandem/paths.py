"""Where Tandem keeps what it can make again: models, tokenizers, tile caches."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """TANDEM_CACHE_DIR, else the platform's user cache folder + "tandem". Not created here."""
    if given := os.environ.get("TANDEM_CACHE_DIR"):
        return Path(given).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "tandem"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tandem"
    return Path.home() / ".cache" / "tandem"


def file_key(path: Path) -> str:
    """Names one state of a file cheaply (path, size, modification time), for caches of what derives from it."""
    import hashlib

    stat = path.stat()
    text = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a whole file or nothing: a partial file never bears the final name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
