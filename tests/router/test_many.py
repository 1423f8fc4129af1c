"""Many calls on one stream: each behaves as a call of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from tandem import rpc
from tandem.errors import TandemError, abort
from tandem.inference.v1 import inference_pb2 as pb
from tandem.many import CallContext, ManyClient, ManyServer
from tandem.many.wire import MAX_START_BYTES, SERVICE, WINDOW_BYTES
from tandem.resume import read_progress
from tests.router.harness import router_for, until
from tests.router.mock_engine import MockConfig, MockEngine, expected

Handler = Callable[[bytes, Any], Awaitable[None]]


@dataclass
class Peer:
    """A server of raw calls and a client of it."""

    server: grpc.aio.Server
    many: ManyServer
    client: ManyClient
    port: int
    pause: list[float]
    messages: list[pb.GenerateManyResponse] = field(default_factory=list)

    @property
    def links(self) -> list[Any]:
        return list(self.many._links)


@contextlib.asynccontextmanager
async def peer(
    handler: Handler, address: str = "127.0.0.1:0", serves_many: bool = True, pause: float = 0.0
) -> AsyncIterator[Peer]:
    many = ManyServer(handler)
    sent: list[pb.GenerateManyResponse] = []

    def render(message: pb.GenerateManyResponse) -> bytes:
        sent.append(message)
        return message.SerializeToString()

    methods: dict[str, Any] = {"Generate": grpc.unary_stream_rpc_method_handler(handler)}
    if serves_many:
        methods["GenerateMany"] = grpc.stream_stream_rpc_method_handler(
            many.serve, pb.GenerateManyRequest.FromString, render
        )
    server, _ = rpc.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port(address)
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        pauses = [pause]
        client = ManyClient(channel, pause=lambda: pauses[0])
        client.start()
        if serves_many:
            await until(lambda: client.shared)
        try:
            yield Peer(server, many, client, port, pauses, sent)
        finally:
            await client.close()
            await server.stop(0)


async def read_all(call: Any) -> bytes:
    out = b""
    while (data := await call.read()) is not grpc.aio.EOF:
        out += data
    return out


async def test_what_calls_say_at_one_moment_is_one_message() -> None:
    beat = asyncio.Condition()
    waiting = 0

    async def handler(raw: bytes, context: Any) -> None:
        nonlocal waiting
        for number in range(10):
            waiting += 1
            async with beat:
                await beat.wait()
            await context.write(raw + b"%d;" % number)

    async with peer(handler) as p:
        calls = [p.client(b"%d:" % n, timeout=None) for n in range(16)]
        answers = asyncio.gather(*(read_all(call) for call in calls))
        for turn in range(10):
            await until(lambda turn=turn: waiting == 16 * (turn + 1))
            async with beat:
                beat.notify_all()
        for n, answer in enumerate(await answers):
            assert answer == b"".join(b"%d:%d;" % (n, number) for number in range(10))
        # The first is empty; all statuses come together.
        assert len(p.messages) <= 12


async def test_a_call_that_nobody_reads_is_held_back_and_holds_nobody_up() -> None:
    written = 0

    async def handler(raw: bytes, context: Any) -> None:
        nonlocal written
        for number in range(300):
            await context.write(bytes([number % 256]) * 1000)
            written += raw == b"slow"

    async with peer(handler) as p:
        slow = p.client(b"slow", timeout=None)
        assert len(await read_all(p.client(b"fast", timeout=None))) == 300_000
        held = written
        # One window on its way to the reader, one in the writer's buffer.
        assert WINDOW_BYTES / 1000 <= held <= 2 * WINDOW_BYTES / 1000 + 2
        await asyncio.sleep(0.05)
        assert written == held
        assert await read_all(slow) == b"".join(bytes([number % 256]) * 1000 for number in range(300))


async def test_a_busy_reader_gets_the_first_token_at_once_and_the_rest_in_few_pieces() -> None:
    async def handler(raw: bytes, context: Any) -> None:
        for number in range(40):
            await context.write(b"%d;" % number)
            await asyncio.sleep(0.005)

    async with peer(handler, pause=0.05) as p:
        call, reads, began = p.client(b"", timeout=None), [], time.monotonic()
        while (data := await call.read()) is not grpc.aio.EOF:
            reads.append((time.monotonic() - began, data))
        assert b"".join(data for _, data in reads) == b"".join(b"%d;" % number for number in range(40))
        # The first three (accepted, prompt, first token) did not wait for each other.
        assert reads[0][1] == b"0;" and reads[2][0] < 0.05
        assert len(reads) <= 10
        # The end does not wait.
        p.pause[0] = 3600.0
        last = p.client(b"", timeout=None)
        assert len(await asyncio.wait_for(read_all(last), 5)) > 0
        # A held call can be cancelled, and its deadline holds.
        held = p.client(b"", timeout=0.1)
        with pytest.raises(grpc.aio.AioRpcError):
            await read_all(held)


async def test_a_cancelled_call_ends_its_handler_and_leaves_the_others() -> None:
    ended: list[bool] = []

    async def handler(raw: bytes, context: CallContext) -> None:
        try:
            await context.write(b"first")
            await asyncio.sleep(0 if raw == b"other" else 3600)
        except asyncio.CancelledError:
            ended.append(context.cancelled())
            raise

    async with peer(handler) as p:
        call, other = p.client(b"", timeout=None), p.client(b"other", timeout=None)
        assert await call.read() == b"first"
        reading = asyncio.ensure_future(call.read())
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        await until(lambda: ended == [True])
        assert await read_all(other) == b"first"
        # In one message, so that the handler never gets to start.
        p.client(b"", timeout=None).cancel()
        await until(lambda: not p.links[0]._calls)


async def test_a_deadline_ends_a_call_on_both_sides() -> None:
    left: list[float | None] = []
    cancelled = asyncio.Event()

    async def handler(raw: bytes, context: Any) -> None:
        left.append(context.time_remaining())
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    async with peer(handler) as p:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await p.client(b"", timeout=0.1).read()
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert left[0] is not None and 0 < left[0] <= 0.1
        await asyncio.wait_for(cancelled.wait(), 2)


async def test_metadata_and_typed_errors_cross() -> None:
    async def handler(raw: bytes, context: Any) -> None:
        given = dict(context.invocation_metadata())
        assert given["x-request-id"] == "réq" and given["x-bin"] == b"\xff"
        await context.write(b"data")
        if raw == b"crash":
            raise RuntimeError("a secret")
        await abort(context, TandemError("QUOTA", "no more", retry_after_s=1.5, limit=3))

    metadata = (("x-request-id", "réq"), ("x-bin", b"\xff"))
    async with peer(handler) as p:
        call = p.client(b"", timeout=None, metadata=metadata)
        assert await call.read() == b"data"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        error = TandemError.from_rpc(failed.value)
        assert (error.reason, error.message, error.retry_after_s) == ("QUOTA", "no more", 1.5)
        assert error.metadata == {"limit": "3"}
        crashed = p.client(b"crash", timeout=None, metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError, match="unexpected") as unknown:
            await read_all(crashed)
        assert unknown.value.code() is grpc.StatusCode.UNKNOWN and "secret" not in str(unknown.value)


async def test_calls_of_their_own_where_there_is_no_shared_stream() -> None:
    async def handler(raw: bytes, context: Any) -> None:
        await context.write(b"shared" if isinstance(context, CallContext) else b"own")

    async with peer(handler, serves_many=False) as p:
        assert await read_all(p.client(b"", timeout=None)) == b"own"
        assert not p.client.shared
    async with peer(handler) as p:
        assert await read_all(p.client(b"", timeout=None)) == b"shared"
        assert await read_all(p.client(bytes(MAX_START_BYTES), timeout=None)) == b"shared"
        assert await read_all(p.client(bytes(MAX_START_BYTES + 1), timeout=None)) == b"own"


async def test_a_lost_stream_ends_its_calls_and_is_made_anew() -> None:
    async def handler(raw: bytes, context: Any) -> None:
        await context.write(raw)
        if raw == b"long":
            await asyncio.sleep(3600)

    async with peer(handler) as p:
        call = p.client(b"long", timeout=None)
        assert await call.read() == b"long"
        await p.server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not p.client.shared
        async with peer(handler, f"127.0.0.1:{p.port}"):
            await until(lambda: p.client.shared, 10)
            assert await read_all(p.client(b"short", timeout=None)) == b"short"


async def test_a_closing_server_finishes_what_runs_and_takes_nothing_more() -> None:
    go_on = asyncio.Event()

    async def handler(raw: bytes, context: Any) -> None:
        await context.write(b"one;")
        await go_on.wait()
        await context.write(b"two;")

    async with peer(handler) as p:
        call = p.client(b"", timeout=None)
        assert await call.read() == b"one;"
        p.many.close()
        await until(lambda: not p.client.shared)
        stopping = asyncio.ensure_future(p.server.stop(10))
        await asyncio.sleep(0.05)
        assert not stopping.done()
        go_on.set()
        assert await read_all(call) == b"two;"
        # Not the whole grace: the stream itself ends with its last call.
        await asyncio.wait_for(stopping, 3)


def request_for(count: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest(model="mock", token_ids=pb.TokenIds(ids=range(40)))
    request.sampling.seed = 7
    request.stop.max_tokens = count
    return request


@pytest.mark.parametrize("newer", [(True, True), (True, False), (False, True)], ids=["both", "first", "second"])
async def test_an_engine_dies_under_streams_that_share_a_connection(newer: tuple[bool, bool]) -> None:
    """From a gateway's client to engines, whether these know shared streams or not: nothing lost, nothing doubled."""
    engines = [MockEngine("127.0.0.1:0", MockConfig(step_s=0.005, many=many)) for many in newer]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        router = await stack.enter_async_context(router_for(",".join(engine.address for engine in engines)))
        views = [router.fleet.engines[engine.address] for engine in engines]
        await until(lambda: all(not view.excluded(time.monotonic()) for view in views))
        await until(lambda: tuple(view.generate.shared for view in views) == newer)
        channel = await stack.enter_async_context(rpc.channel(router.address))
        client = ManyClient(channel)
        client.start()
        await until(lambda: client.shared)
        request = request_for(60)
        calls = [client(request.SerializeToString(), timeout=None) for _ in range(8)]
        readers = [asyncio.ensure_future(read_all(call)) for call in calls]
        await until(lambda: any(engine.running >= 1 for engine in engines) and sum(e.steps for e in engines) > 60)
        victim = max(engines, key=lambda engine: engine.running)
        await victim.kill()
        ids, text = expected(list(range(40)), 60, seed=7)
        for data in await asyncio.gather(*readers):
            progress = read_progress(request, [data])
            assert progress.complete
            assert progress.choices[0].ids == ids and progress.choices[0].text_bytes == len(text.encode())
        await client.close()
