"""The calling side of GenerateMany: each call looks like a grpc.aio call of Generate that is read with `read`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from tandem.inference.v1 import inference_pb2 as pb
from tandem.many.wire import GENERATE, GENERATE_MANY, MAX_START_BYTES, WINDOW_BYTES, Bell, from_wire, to_wire

RECONNECT_S = (0.1, 2.0)
# A peer without GenerateMany is asked again so seldom: it may have been replaced.
UNSUPPORTED_RETRY_S = 30.0
# Reads that never wait for more to come: accepted, prompt scores, first token.
PROMPT_READS = 3
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class ManyCall:
    """One call on a shared stream."""

    __slots__ = (
        "_chunks",
        "_gone",
        "_held",
        "_link",
        "_read_at",
        "_read_bytes",
        "_reads",
        "_status",
        "_timer",
        "_waiter",
        "number",
    )

    def __init__(self, link: _Link, number: int, timeout: float | None) -> None:
        self._link = link
        self.number = number
        self._chunks: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self._status: grpc.aio.AioRpcError | None = None
        self._gone = False
        self._read_bytes = 0
        self._reads = 0
        self._read_at = 0.0
        self._held = False
        self._timer = None if timeout is None else link.loop.call_later(max(0.0, timeout), self._expire)

    async def read(self) -> Any:
        """All bytes that came since the last call, as one serialized GenerateResponse; grpc.aio.EOF at the end.

        Raises:
            grpc.aio.AioRpcError: the call failed. asyncio.CancelledError: it was cancelled.
        """
        pause = self._link.pause()
        if pause and self._reads >= PROMPT_READS and self._status is None and not self._gone:
            await self._gather(pause)
        while not self._chunks:
            if self._status is not None:
                if self._status.code() is grpc.StatusCode.OK:
                    return grpc.aio.EOF
                raise self._status
            if self._gone:
                raise asyncio.CancelledError
            self._waiter = self._link.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if pause:
            self._reads += 1
            self._read_at = self._link.loop.time()
        self._read_bytes += len(data)
        if self._read_bytes >= WINDOW_BYTES // 2:
            if not self._gone:
                self._link.say(pb.CallFrame(call=self.number, credit=self._read_bytes))
            self._read_bytes = 0
        return data

    async def _gather(self, pause: float) -> None:
        """Lets what comes until `pause` seconds after the last read gather, unless the call ends."""
        loop = self._link.loop
        if self._read_at + pause <= loop.time():
            return
        waiter = self._waiter = loop.create_future()
        timer = loop.call_at(self._read_at + pause, _wake, waiter)
        self._held = True
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter, self._held = None, False

    async def code(self) -> grpc.StatusCode:
        """The status that ended the call; CANCELLED if none did."""
        return self._status.code() if self._status is not None else grpc.StatusCode.CANCELLED

    def cancel(self) -> bool:
        """Gives the call up; harmless when it has ended."""
        if self._gone:
            return False
        self._leave()
        if self._waiter is not None:
            self._waiter.cancel()
        return True

    def _expire(self) -> None:
        self._leave()
        self._end(error_of(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _leave(self) -> None:
        self._link.calls.pop(self.number, None)
        self._link.say(pb.CallFrame(call=self.number, cancel=True))
        self._over()

    def _over(self) -> None:
        self._gone = True
        if self._timer is not None:
            self._timer.cancel()

    # -- for the link

    def receive(self, frame: pb.AnswerFrame) -> None:
        data = frame.data
        if data:
            self._chunks.append(data)
            if self._waiter is not None and not self._held:
                _wake(self._waiter)
        if frame.HasField("status"):
            status = frame.status
            code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
            self.end(error_of(code, status.message, from_wire(status.trailing)))

    def end(self, status: grpc.aio.AioRpcError) -> None:
        self._over()
        self._end(status)

    def _end(self, status: grpc.aio.AioRpcError) -> None:
        self._status = status
        if self._waiter is not None:
            _wake(self._waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def error_of(code: grpc.StatusCode, details: str, trailing: Iterable[Any] = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class _Link:
    """One stream of many calls. `gone` is set when nothing more may be started on it."""

    def __init__(self, call: Any, pause: Callable[[], float]) -> None:
        self.pause = pause
        self.loop = asyncio.get_running_loop()
        self._call = call
        self.calls: dict[int, ManyCall] = {}
        self._frames: list[pb.CallFrame] = []
        self._bell = Bell(lambda: 0.0)
        self._number = 0
        self.up = asyncio.Event()
        self.gone = asyncio.Event()
        self.code = grpc.StatusCode.OK

    def start(self, raw: bytes, timeout: float | None, metadata: Iterable[Any]) -> ManyCall:
        self._number += 1
        call = self.calls[self._number] = ManyCall(self, self._number, timeout)
        start = pb.CallStart(request=raw, metadata=to_wire(metadata))
        if timeout is not None:
            start.timeout_ms = 1000 * timeout
        self.say(pb.CallFrame(call=self._number, start=start))
        return call

    def say(self, frame: pb.CallFrame) -> None:
        self._frames.append(frame)
        self._bell.ring(True)

    async def run(self) -> None:
        """Until the stream ends; then so do its calls."""
        writer = asyncio.ensure_future(self._send())
        why = "the stream ended"
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self.up.set()
                if message.closing:
                    self.gone.set()
                for frame in message.frames:
                    self._receive(frame)
            self.code = await self._call.code()
        except grpc.aio.AioRpcError as error:
            self.code, why = error.code(), error.details() or error.code().name
        finally:
            self.gone.set()
            writer.cancel()
            self._call.cancel()
            # Whatever ended the stream, none of its calls was refused: each may be tried elsewhere.
            lost = error_of(grpc.StatusCode.UNAVAILABLE, why)
            for call in self.calls.values():
                call.end(lost)
            self.calls.clear()

    def _receive(self, frame: pb.AnswerFrame) -> None:
        call = self.calls.get(frame.call)
        if call is None:
            return
        call.receive(frame)
        if frame.HasField("status"):
            del self.calls[frame.call]

    async def _send(self) -> None:
        while True:
            await self._bell.wait()
            while self._frames:
                frames, self._frames = self._frames, []
                try:
                    await self._call.write(pb.GenerateManyRequest(frames=frames))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    # The reader is told why.
                    return


class ManyClient:
    """Generate to one peer: on the shared stream while there is one, else as a call of its own."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: Iterable[tuple[str, str]] = (),
        pause: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        Args:
            metadata: of the shared stream itself, such as the services' token.
            pause: seconds between two reads of a call at the moment; what comes meanwhile is read as one.
        """
        self._pause = pause
        self._metadata = tuple(metadata)
        self._plain: Any = channel.unary_stream(GENERATE)
        self._shared: Any = channel.stream_stream(
            GENERATE_MANY,
            request_serializer=pb.GenerateManyRequest.SerializeToString,
            response_deserializer=pb.GenerateManyResponse.FromString,
        )
        self._link: _Link | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._runs: set[asyncio.Task[None]] = set()

    @property
    def shared(self) -> bool:
        """Whether calls go on a shared stream now."""
        return self._link is not None and not self._link.gone.is_set()

    def start(self) -> None:
        """Keeps a stream open from now on."""
        self._keeper = asyncio.ensure_future(self._keep())

    async def close(self) -> None:
        tasks = [*self._runs, *([self._keeper] if self._keeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __call__(
        self, raw: bytes, *, timeout: float | None, metadata: Iterable[Any] = (), wait_for_ready: bool = False
    ) -> Any:
        """A call of Generate. `raw`: the serialized request; `timeout` in seconds; read it with `read`."""
        link = self._link
        if link is None or link.gone.is_set() or len(raw) > MAX_START_BYTES:
            return self._plain(raw, timeout=timeout, metadata=tuple(metadata), wait_for_ready=wait_for_ready)
        return link.start(raw, timeout, metadata)

    async def _keep(self) -> None:
        pause = RECONNECT_S[0]
        while True:
            link = _Link(self._shared(metadata=self._metadata, wait_for_ready=True), self._pause)
            run = asyncio.ensure_future(link.run())
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)
            up, gone = asyncio.ensure_future(link.up.wait()), asyncio.ensure_future(link.gone.wait())
            try:
                await asyncio.wait({up, gone}, return_when=asyncio.FIRST_COMPLETED)
                if up.done():
                    self._link, pause = link, RECONNECT_S[0]
                    await gone
            finally:
                self._link = None
                up.cancel()
                gone.cancel()
            unsupported = link.code is grpc.StatusCode.UNIMPLEMENTED
            await asyncio.sleep(UNSUPPORTED_RETRY_S if unsupported else pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, RECONNECT_S[1])
