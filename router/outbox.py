"""Between an engine's stream and a client's: the first bytes go at once, a backlog is joined into few messages.

Writing a gRPC message costs more than everything else that the router does for a token. So when the process gets busy,
each stream waits a little between its writes, and what came meanwhile leaves as one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from tandem.many import CallContext
from tandem.pace import Pace

# Under the 4 MiB that gRPC clients accept by default.
MAX_WRITE_BYTES = 1024 * 1024


class Outbox:
    """A bounded buffer with one writer. Serialized GenerateResponses may be joined: they are one response then."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]], limit: int, pace: Pace | None = None) -> None:
        self._write = write
        self._limit = limit
        self._pace = pace
        self._chunks: list[bytes] = []
        self._size = 0
        self._closed = False
        self._wake_planned = False
        self._next_at = 0.0
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.messages_in = 0
        self.messages_out = 0

    def put(self, data: bytes) -> bool:
        """Adds bytes; True if the buffer is over its limit and the caller should wait for `room`."""
        self._chunks.append(data)
        self._size += len(data)
        self.messages_in += 1
        if not self._wake_planned:
            self._wake_planned = True
            delay = self._next_at - self._loop.time() if self._next_at else 0.0
            if delay > 0:
                self._loop.call_later(delay, self._filled.set)
            else:
                self._filled.set()
        return self._size > self._limit

    def no_pause(self) -> None:
        """What is put next goes out at once (a first token does)."""
        self._next_at = 0.0

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
            self._wake_planned = False
            self._filled.clear()
            if self._pace is not None and self._pace.seconds:
                self._next_at = self._loop.time() + self._pace.seconds
            else:
                self._next_at = 0.0
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


class Sink(Protocol):
    """Where a stream's bytes go."""

    def put(self, data: bytes) -> bool: ...

    def no_pause(self) -> None: ...

    async def room(self) -> None: ...


class SharedSink:
    """The buffer of a call on a shared stream, which is written together with those of all others."""

    def __init__(self, context: CallContext, limit: int) -> None:
        self._context = context
        self._limit = limit

    def put(self, data: bytes) -> bool:
        """Adds bytes; True if the buffer is over its limit and the caller should wait for `room`."""
        return self._context.put(data) > self._limit

    def no_pause(self) -> None:
        """What is put next goes out at once (a first token does)."""
        self._context.hurry()

    async def room(self) -> None:
        """Waits until the buffer is under its limit."""
        await self._context.room(self._limit)
