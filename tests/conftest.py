"""What tests of all folders share."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache import use_own_cache

# Before anything reads or writes it.
use_own_cache()
# Tests share the machine with each other; speed is not their point.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def free_port() -> int:
    """A TCP port on loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder with a short path, for Unix sockets (pytest's own may be longer than a socket path allows)."""
    path = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
