"""Fixtures of the engine's tests."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.engine_service.server import Server, serve


@pytest_asyncio.fixture
async def shared() -> AsyncIterator[Server]:
    """A server with defaults."""
    async with serve() as server:
        yield server


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="tdm", dir="/tmp") as folder:
        yield Path(folder)
