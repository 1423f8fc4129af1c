"""Small help with asyncio tasks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


async def cancel_quietly(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it is over, however it ends."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task
