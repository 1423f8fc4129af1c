"""The last text requests of this process with what they cost: for the live page. No prompts, no outputs."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.context import RequestContext

MAX_WAITING = 1000


class Recent:
    """Keeps finished requests, and tells followers about each."""

    def __init__(self, size: int) -> None:
        """`size`: requests that are kept; 0 turns the record, and with it the asking for receipts, off."""
        self._last: deque[dict[str, Any]] = deque(maxlen=size)
        self._followers: set[asyncio.Queue[dict[str, Any]]] = set()
        self.on = size > 0

    def finished(self, context: RequestContext, path: str, status: int, seconds: float) -> None:
        """Notes a request that has ended, well or not."""
        if not self.on:
            return
        entry: dict[str, Any] = {
            "id": context.id,
            "key": context.key.id if context.key else None,
            "unix_ms": int(time.time() * 1000),
            "path": path,
            "status": status,
            "model": context.model,
            "engine": context.engine,
            "prompt_tokens": context.prompt_tokens,
            "cached_tokens": context.cached_tokens,
            "completion_tokens": context.completion_tokens,
            "ms": round(seconds * 1000, 1),
            "ttft_ms": round(context.ttft_s * 1000, 1) if context.ttft_s is not None else None,
            "reason": context.finish,
            "receipts": context.receipts,
        }
        self._last.append(entry)
        for queue in self._followers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(entry)

    def last(self, count: int, key: str | None) -> list[dict[str, Any]]:
        """The last `count` requests of a key, oldest first. Without keys all are everybody's."""
        mine = [entry for entry in self._last if key is None or entry["key"] == key]
        return mine[-count:] if count else []

    def holds(self, request_id: str, key: str) -> bool:
        """Whether a request of this id was the key's."""
        return any(entry["id"] == request_id and entry["key"] == key for entry in self._last)

    def follow(self) -> asyncio.Queue[dict[str, Any]]:
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(MAX_WAITING)
        self._followers.add(queue)
        return queue

    def unfollow(self, queue: asyncio.Queue[dict[str, Any]]) -> None:
        self._followers.discard(queue)
