"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.engine_service.server import Server, serve


@pytest_asyncio.fixture
async def shared() -> AsyncIterator[Server]:
    """A server with defaults."""
    async with serve() as server:
        yield server
