"""What waits to be written to one client: bounded, and coalescing while the client is slow. For the event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb

# A delta's bitmap of accepted drafts has so many bits; longer deltas go without it.
DRAFTED_BITS = 64


def merge_delta(into: pb.Delta, more: pb.Delta) -> None:
    """Appends a delta that follows immediately."""
    if into.drafted or more.drafted:
        fits = len(into.ids) + len(more.ids) <= DRAFTED_BITS
        into.drafted = into.drafted | more.drafted << len(into.ids) if fits else 0
    into.ids.extend(more.ids)
    into.text += more.text
    into.logprobs.extend(more.logprobs)


class Outbox:
    """Events of one stream in order. Deltas of a choice that nobody has read yet become one delta."""

    def __init__(self, limit_bytes: int, merge: bool = True) -> None:
        self._limit = limit_bytes
        self._merge = merge
        self._events: list[pb.GenerateEvent] = []
        self._open: dict[int, pb.Delta] = {}
        self._bytes = 0
        self._wake = asyncio.Event()
        self._closed = False
        self.error: TandemError | None = None
        # Called once when the bound is exceeded.
        self.on_overflow: Callable[[], object] | None = None

    def put(self, event: pb.GenerateEvent) -> bool:
        """Adds an event. False if the bound is exceeded: the stream has failed with SLOW_READER then."""
        if self._closed:
            return True
        self._bytes += event.ByteSize()
        if self._bytes > self._limit and self._events:
            self.fail(
                TandemError(
                    "SLOW_READER", f"the reader left more than {self._limit} bytes unread", limit_bytes=self._limit
                )
            )
            if self.on_overflow is not None:
                self.on_overflow()
            return False
        kind = event.WhichOneof("event")
        if kind == "delta" and self._merge and event.delta.choice in self._open:
            merge_delta(self._open[event.delta.choice], event.delta)
        else:
            self._events.append(event)
            if kind == "delta":
                self._open[event.delta.choice] = event.delta
            elif kind == "finished":
                self._open.pop(event.finished.choice, None)
        self._wake.set()
        return True

    def fail(self, error: TandemError) -> None:
        """Ends the stream with an error; what was not read yet is dropped only for a slow reader."""
        if self._closed:
            return
        if error.reason == "SLOW_READER":
            self._events.clear()
        self.error = error
        self.close()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def get(self) -> list[pb.GenerateEvent]:
        """The events since the last call; waits for some. Empty: the stream has ended (see `error`)."""
        while not self._events and not self._closed:
            self._wake.clear()
            await self._wake.wait()
        events, self._events = self._events, []
        self._open.clear()
        self._bytes = 0
        return events
