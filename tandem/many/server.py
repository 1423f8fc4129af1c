"""The serving side of GenerateMany: runs the handler of Generate once per call, on one stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc

from tandem import rpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.many.wire import FULL_MESSAGE_BYTES, WINDOW_BYTES, Bell, MetadataPairs, from_wire, to_wire

log = logging.getLogger("tandem.many")

# Far under gRPC's limit of a message: an answer's part that is larger fails its own call, not all of them.
MAX_DATA_BYTES = rpc.MAX_MESSAGE_BYTES // 2


class CallContext:
    """One call, with what the handlers of Generate use of grpc.aio.ServicerContext, and a buffer of its own."""

    def __init__(self, link: _Link, number: int, start: pb.CallStart) -> None:
        self._link = link
        self.number = number
        self._metadata = from_wire(start.metadata)
        self._ends_at = time.monotonic() + start.timeout_ms / 1000 if start.HasField("timeout_ms") else None
        self._chunks: list[bytes] = []
        self._size = 0
        self._credit = WINDOW_BYTES
        self._room = asyncio.Event()
        self._urgent = True
        self._cancelled = False
        self.status: pb.CallStatus | None = None
        self.task: asyncio.Task[None] | None = None

    # -- as in gRPC

    def invocation_metadata(self) -> MetadataPairs:
        return self._metadata

    def time_remaining(self) -> float | None:
        """Seconds until the caller gives up."""
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def cancelled(self) -> bool:
        """Whether the caller gave up."""
        return self._cancelled

    async def write(self, message: Any) -> None:
        """Sends a message; returns when the reader is less than its window behind."""
        data = self._link.render(message)
        self.put(data)
        await self.room(WINDOW_BYTES)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Iterable[Any] = ()) -> NoReturn:
        """Ends the call with a status.

        Raises:
            grpc.aio.AbortError: always.
        """
        self.status = pb.CallStatus(code=code.value[0], message=details, trailing=to_wire(trailing))
        raise grpc.aio.AbortError(f"{code.name}: {details}")

    # -- the buffer

    def put(self, data: bytes) -> int:
        """Takes bytes to be sent, joined with others of this call that wait; returns how many wait."""
        if len(data) > MAX_DATA_BYTES:
            message = f"a part of the answer has {len(data)} bytes"
            self.status = pb.CallStatus(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message=message)
            raise grpc.aio.AbortError(message)
        self._chunks.append(data)
        self._size += len(data)
        if self._credit > 0:
            self._link.ready(self, self._urgent)
            self._urgent = False
        return self._size

    def hurry(self) -> None:
        """What is put next goes out at once."""
        self._urgent = True

    async def room(self, limit: int) -> None:
        """Waits until at most `limit` bytes wait to be sent."""
        while self._size > limit:
            self._room.clear()
            await self._room.wait()

    # -- for the link

    def allow(self, credit: int) -> None:
        self._credit += credit
        if self._credit > 0 and (self._chunks or self.status is not None):
            self._link.ready(self, True)

    def give_up(self) -> None:
        self._cancelled = True
        if self.task is not None:
            self.task.cancel()

    def take(self, frames: Any) -> int:
        """Adds a frame with what may be sent now; returns its bytes of data."""
        if not self._chunks or self._credit <= 0:
            return 0
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._size = 0
        self._credit -= len(data)
        self._room.set()
        frames.add(call=self.number, data=data)
        return len(data)

    @property
    def empty(self) -> bool:
        return not self._chunks


Handler = Callable[[Any, Any], Awaitable[None]]


class ManyServer:
    """GenerateMany over a handler of Generate."""

    def __init__(
        self,
        handler: Handler,
        read: Callable[[bytes], Any] = bytes,
        render: Callable[[Any], bytes] = bytes,
        pause: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        Args:
            handler: called with what `read` makes of the request's bytes, and a CallContext.
            read, render: (de)serialisers of requests and responses.
            pause: seconds between two messages that are not urgent.
        """
        self._handler = handler
        self._read = read
        self._render = render
        self._pause = pause
        self._links: set[_Link] = set()
        self._closing = False

    async def serve(self, requests: AsyncIterator[pb.GenerateManyRequest], context: Any) -> None:
        """Serves one stream until its client leaves, or until its calls are over once the server closes."""
        link = _Link(self._handler, self._read, self._render, self._pause, context)
        self._links.add(link)
        if self._closing:
            link.close()
        try:
            await link.run(requests)
        finally:
            self._links.discard(link)

    def close(self) -> None:
        """Tells clients to start nothing more here; streams end when their calls are over."""
        self._closing = True
        for link in self._links:
            link.close()


class _Link:
    """One stream of many calls."""

    def __init__(
        self,
        handler: Handler,
        read: Callable[[bytes], Any],
        render: Callable[[Any], bytes],
        pause: Callable[[], float],
        context: Any,
    ) -> None:
        self._handler = handler
        self._read = read
        self.render = render
        self._context = context
        self._calls: dict[int, CallContext] = {}
        # In the order in which they became ready.
        self._ready: dict[CallContext, None] = {}
        self._bell = Bell(pause)
        self._closing = False
        self._told = False

    # -- what calls say

    def ready(self, call: CallContext, urgent: bool) -> None:
        self._ready[call] = None
        self._bell.ring(urgent)

    def close(self) -> None:
        self._closing = True
        self._bell.ring(True)

    # -- the stream

    async def run(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> None:
        await self._context.write(pb.GenerateManyResponse())
        reader, writer = asyncio.ensure_future(self._receive(requests)), asyncio.ensure_future(self._send())
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = [call.task for call in self._calls.values() if call.task is not None]
            for call in tuple(self._calls.values()):
                call.give_up()
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, *tasks, return_exceptions=True)

    async def _receive(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> None:
        async for message in requests:
            for frame in message.frames:
                self._frame(frame)

    def _frame(self, frame: pb.CallFrame) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "start":
            call = self._calls[frame.call] = CallContext(self, frame.call, frame.start)
            call.task = asyncio.create_task(self._run(call, frame.start.request))
            call.task.add_done_callback(lambda _: self._finished(call))
            return
        known = self._calls.get(frame.call)
        if known is None:
            return
        if kind == "credit":
            known.allow(frame.credit)
        elif kind == "cancel":
            known.give_up()
            if known.task is None or known.task.done():
                self._forget(known)

    async def _run(self, call: CallContext, request: bytes) -> None:
        try:
            await self._handler(self._read(request), call)
            call.status = pb.CallStatus()
        except grpc.aio.AbortError:
            pass
        except Exception as error:
            log.exception("call failed")
            call.status = pb.CallStatus(code=grpc.StatusCode.UNKNOWN.value[0], message=f"unexpected {type(error)}")

    def _finished(self, call: CallContext) -> None:
        """Its task is over."""
        if call.cancelled():
            self._forget(call)
            return
        if call.status is None:
            call.status = pb.CallStatus(code=grpc.StatusCode.CANCELLED.value[0], message="cancelled by the server")
        self.ready(call, True)

    def _forget(self, call: CallContext) -> None:
        self._calls.pop(call.number, None)
        self._ready.pop(call, None)
        if self._closing:
            self._bell.ring(True)

    async def _send(self) -> None:
        while True:
            await self._bell.wait()
            while self._ready or (self._closing and not self._told):
                message = self._message()
                if message.frames or message.closing:
                    await self._context.write(message)
            if self._closing and not self._calls:
                return
            self._bell.written()

    def _message(self) -> pb.GenerateManyResponse:
        message = pb.GenerateManyResponse()
        if self._closing and not self._told:
            message.closing = self._told = True
        frames, size = message.frames, 0
        while self._ready and size < FULL_MESSAGE_BYTES:
            call = next(iter(self._ready))
            del self._ready[call]
            size += call.take(frames)
            if call.status is not None and call.empty:
                frames.add(call=call.number, status=call.status)
                self._calls.pop(call.number, None)
        return message
