"""Cancels, deadlines, overload, drain, hung and failing steps, slow readers."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from tandem.engine.v1 import engine_pb2
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tests.engine_service.fakes import FakeRunner
from tests.engine_service.server import Server, ask, serve, until

LONG = pb.StopConditions(max_tokens=100, ignore_eos=True)


async def hold(server: Server) -> None:
    """Stops the fake model inside its next step."""
    server.runner.step_began.clear()
    server.runner.gate.clear()


@pytest.mark.parametrize("n", [1, 3])
async def test_cancel_frees_blocks_within_one_step(n: int) -> None:
    async with serve() as server:
        server.runner.hold_at = 5
        call = server.call(ask("to be cancelled", n=n, stop=LONG))
        await call.read()
        await until(lambda: not server.runner.gate.is_set())
        assert server.engine.stats.output_tokens > 0
        call.cancel()
        await until(lambda: not server.engine.streams)
        steps = server.runner.steps
        server.runner.gate.set()
        await server.idle()
        # Only the step that ran when the cancel came was finished.
        assert server.runner.steps == steps + 1


async def test_cancel_while_waiting() -> None:
    async with serve(max_num_seqs=1) as server:
        first = server.call(ask("one", stop=LONG))
        await first.read()
        second = server.call(ask("two", stop=LONG))
        await second.read()
        second.cancel()
        await until(lambda: len(server.engine.streams) <= 1)
        first.cancel()
        await server.idle()


async def test_deadline_ends_running_and_waiting() -> None:
    async with serve(max_num_seqs=1) as server:
        await hold(server)
        running = asyncio.create_task(server.generate(ask("one", stop=LONG, timeout_ms=150)))
        waiting = asyncio.create_task(server.generate(ask("two", stop=LONG, timeout_ms=100)))
        await until(lambda: len(server.engine.streams) == 2)
        await asyncio.sleep(0.2)
        server.runner.gate.set()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        for result in results:
            assert isinstance(result, TandemError) and result.reason == "DEADLINE", result
            assert result.code == grpc.StatusCode.DEADLINE_EXCEEDED
        await server.idle()


async def test_full_queue_refuses_at_once() -> None:
    async with serve(max_num_seqs=2, max_waiting=1) as server:
        await hold(server)
        calls = [server.call(ask(f"prompt {index}", stop=LONG)) for index in range(3)]
        for call in calls:
            await call.read()
        with pytest.raises(TandemError) as caught:
            await server.generate(ask("one too many"))
        error = caught.value
        assert error.reason == "ENGINE_FULL" and error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.retry_after_s == 1.0 and error.metadata["max_waiting"] == "1"
        server.runner.gate.set()
        for call in calls:
            call.cancel()
        await server.idle()


async def became(server: Server, serving: bool) -> None:
    """Waits until health says so."""
    for _ in range(500):
        if await server.serving() == serving:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"health never became {serving}")


async def test_drain_lets_requests_finish_and_refuses_new_ones() -> None:
    async with serve() as server:
        await hold(server)
        running = asyncio.create_task(server.generate(ask("keep me")))
        await until(lambda: bool(server.engine.streams))
        answer = await server.control.Drain(engine_pb2.DrainRequest(grace_ms=60_000))
        assert (answer.remaining, answer.state) == (1, engine_pb2.ENGINE_STATE_DRAINING)
        await became(server, serving=False)
        assert await server.serving("live"), "draining is no illness"
        with pytest.raises(TandemError) as caught:
            await server.generate(ask())
        assert caught.value.reason == "ENGINE_DRAINING" and caught.value.code == grpc.StatusCode.UNAVAILABLE
        server.runner.gate.set()
        assert len((await running).ids()) == 8
        answer = await server.control.Drain(engine_pb2.DrainRequest(cancel=True))
        assert answer.state == engine_pb2.ENGINE_STATE_READY
        assert (await server.generate(ask())).ids()
        await became(server, serving=True)


async def test_end_of_grace_ends_streams_as_unavailable() -> None:
    async with serve() as server:
        running = asyncio.create_task(server.generate(ask("cut me", stop=LONG)))
        await hold(server)
        await until(lambda: bool(server.engine.streams))
        await server.control.Drain(engine_pb2.DrainRequest(grace_ms=50))
        with pytest.raises(TandemError) as caught:
            await running
        assert caught.value.reason == "ENGINE_DRAINING" and caught.value.code == grpc.StatusCode.UNAVAILABLE
        server.runner.gate.set()
        await server.idle()


async def test_hung_step_turns_health_and_fails_over() -> None:
    async with serve(stall_limit=0.3) as server:
        assert await server.serving()
        await hold(server)
        with pytest.raises(TandemError) as caught:
            await server.generate(ask("hangs"))
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE and caught.value.reason == "NO_ENGINE"
        await became(server, serving=False)
        assert not await server.serving("live")
        load = await anext(aiter(server.control.WatchLoad(engine_pb2.WatchLoadRequest())))
        assert load.state == engine_pb2.ENGINE_STATE_STUCK and load.work_pending and load.last_error
        with pytest.raises(TandemError):
            await server.generate(ask("while stuck"))
        server.runner.gate.set()
        await until(lambda: server.engine.state == engine_pb2.ENGINE_STATE_READY)
        assert (await server.generate(ask("again"))).ids()
        await became(server, serving=True)
        assert await server.serving("live")


async def test_failing_step_ends_its_requests_only() -> None:
    async with serve() as server:
        before = await server.generate(ask("fine"))
        server.runner.fail_next = RuntimeError("secret detail of the machine")
        with pytest.raises(TandemError) as caught:
            await server.generate(ask("hit"))
        assert caught.value.reason == "INTERNAL" and "secret" not in caught.value.message
        assert (await server.generate(ask("fine"))).ids() == before.ids()
        await server.idle()


async def test_slow_reader_is_dropped() -> None:
    stop = pb.StopConditions(max_tokens=2000, ignore_eos=True)
    runner = FakeRunner(num_blocks=600, max_model_len=2400)
    # gRPC's own window takes some 64 KiB before the writes wait; 20 alternatives per token fill it soon.
    async with serve(runner, stream_buffer_bytes=20_000) as server:
        call = server.call(ask("slow", stop=stop, output=pb.OutputOptions(logprobs=20)))
        await call.read()
        await until(lambda: not server.engine.streams, seconds=60)
        with pytest.raises(grpc.RpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert TandemError.from_rpc(caught.value).reason == "SLOW_READER"
        assert runner.steps < 2000
        await server.idle()


async def test_shutdown_ends_streams_with_a_status() -> None:
    async with serve() as server:
        await hold(server)
        running = asyncio.create_task(server.generate(ask("bye", stop=LONG)))
        await until(lambda: bool(server.engine.streams))
        stopping = asyncio.create_task(server.process.stop())
        await asyncio.sleep(0.05)
        server.runner.gate.set()
        await stopping
        with pytest.raises(TandemError) as caught:
            await running
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE
        assert server.runner.closed


async def test_before_the_model_is_there_it_says_so() -> None:
    from engine_service.process import Process
    from engine_service.settings import EngineSettings
    from tandem import rpc
    from tandem.inference.v1 import inference_pb2_grpc

    process = Process(EngineSettings(listen="127.0.0.1:0"))
    await process.start()
    channel = rpc.channel(f"127.0.0.1:{process.port}")
    try:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.GetModelInfo(pb.GetModelInfoRequest())
        error = TandemError.from_rpc(caught.value)
        assert error.reason == "NO_ENGINE" and error.retry_after_s is not None
        assert not (await stub.ListModels(pb.ListModelsRequest())).models
    finally:
        with contextlib.suppress(Exception):
            await channel.close()
        await process.stop()
