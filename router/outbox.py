"""Between an engine's stream and a client's: the first bytes go at once, a backlog is joined into few messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

# Under the 4 MiB that gRPC clients accept by default.
MAX_WRITE_BYTES = 1024 * 1024


class Outbox:
    """A bounded buffer with one writer. Serialized GenerateResponses may be joined: they are one response then."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]], limit: int) -> None:
        self._write = write
        self._limit = limit
        self._chunks: list[bytes] = []
        self._size = 0
        self._closed = False
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()
        self.messages_in = 0
        self.messages_out = 0

    def put(self, data: bytes) -> bool:
        """Adds bytes; True if the buffer is over its limit and the caller should wait for `room`."""
        self._chunks.append(data)
        self._size += len(data)
        self.messages_in += 1
        self._filled.set()
        return self._size > self._limit

    async def room(self) -> None:
        """Waits until the buffer is under its limit."""
        while self._size > self._limit:
            self._drained.clear()
            await self._drained.wait()

    def close(self) -> None:
        """No more bytes will come; `run` returns when all are written."""
        self._closed = True
        self._filled.set()

    async def run(self) -> None:
        """Writes until closed and empty."""
        while True:
            while self._chunks:
                await self._write(self._take())
                self.messages_out += 1
                self._drained.set()
            if self._closed:
                return
            self._filled.clear()
            await self._filled.wait()

    def _take(self) -> bytes:
        count, size = 0, 0
        for chunk in self._chunks:
            if count and size + len(chunk) > MAX_WRITE_BYTES:
                break
            count, size = count + 1, size + len(chunk)
        data = self._chunks[0] if count == 1 else b"".join(self._chunks[:count])
        del self._chunks[:count]
        self._size -= size
        return data
