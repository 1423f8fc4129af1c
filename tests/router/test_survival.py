"""Requests outlive their engines: retries before the first token, resumed streams after it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import grpc
import pytest

from router.engine import Engine
from tandem import rpc
from tandem.engine.v1 import engine_pb2 as epb
from tandem.engine.v1 import engine_pb2_grpc
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.router.v1 import router_pb2 as rpb
from tests.router.harness import Cluster, Result, cluster, collect, request, router_for, until
from tests.router.mock_engine import MockConfig, MockEngine, expected

PROMPT = list(range(100))
SLOW = MockConfig(step_s=0.01)


def busy(c: Cluster) -> MockEngine:
    """The engine that runs the only request."""
    return next(engine for engine in c.engines if engine.running)


def kill_at(c: Cluster, tokens: int) -> object:
    """Kills the engine in use once the client has so many tokens of choice 0."""
    done = False

    async def act(result: Result) -> None:
        nonlocal done
        if not done and len(result.ids.get(0, ())) >= tokens:
            done = True
            await busy(c).kill()

    return act


@pytest.mark.parametrize(
    "shape", ["greedy", "seeded", "unseeded", "n2", "logprobs", "schema", "held_text", "prompt_logprobs"]
)
async def test_stream_survives_the_death_of_its_engine(shape: str) -> None:
    config = MockConfig(step_s=0.01, text_every=3 if shape == "held_text" else 1)
    async with cluster(2, config) as c:
        message = request(PROMPT, 30)
        message.output.receipt = True
        if shape == "greedy":
            message.sampling.temperature = 0
        elif shape in ("seeded", "n2", "schema"):
            message.sampling.seed = 12345
            message.sampling.temperature = 1
        if shape == "n2":
            message.n = 2
        if shape == "logprobs":
            message.output.logprobs = 0
        if shape == "prompt_logprobs":
            message.output.prompt_logprobs = 0
        if shape == "schema":
            message.structured.json_schema = '{"type": "object"}'
        result = await collect(c.stub, message, kill_at(c, 10))
        seed = result.accepted[0].seed
        for choice in range(message.n or 1):
            ids, text = expected(PROMPT, 30, seed, choice, greedy=shape == "greedy")
            assert result.ids[choice] == ids
            assert result.text[choice] == text
            assert not result.logprobs[choice] or result.logprobs[choice] == ids
        assert sorted(result.finished) == list(range(message.n or 1))
        assert len(result.accepted) == 1
        assert result.prompts == (shape == "prompt_logprobs")
        assert result.usage[0].prompt_tokens == 100
        assert result.usage[0].completion_tokens == 30 * (message.n or 1)
        assert result.usage[0].receipt.attempts == 2
        resumed = [call for engine in c.engines for call in engine.calls if call.attempt == 2]
        assert len(resumed) == 1 and resumed[0].resume.prompt_tokens == 100
        assert resumed[0].structured.json_schema == message.structured.json_schema


async def test_other_numerics_are_told() -> None:
    async with cluster(2, SLOW) as c:
        c.engines[1].config.numerics_id = c.engines[0].config.numerics_id + "-other"
        await asyncio.sleep(0.2)
        result = await collect(c.stub, request(PROMPT, 20), kill_at(c, 5))
        assert len(result.ids[0]) == 20
        assert len(result.accepted) == 2
        assert not result.accepted[1].exact_resume


async def test_resume_prefers_equal_numerics() -> None:
    async with cluster(4, SLOW) as c:
        for engine in c.engines[:2]:
            engine.config.numerics_id = "a"
        await asyncio.sleep(0.2)
        result = await collect(c.stub, request(PROMPT, 20), kill_at(c, 5))
        assert len(result.accepted) == 1


async def test_two_lives_lost_is_a_crash_and_refused_afterwards() -> None:
    config = MockConfig(step_s=0.005, poison=0, die_after=3)
    async with cluster(3, config) as c:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(c.stub, request(PROMPT, 20))
        assert TandemError.from_rpc(caught.value).reason == "ENGINE_CRASH"
        calls = sum(len(engine.calls) for engine in c.engines)
        assert calls == 2
        again = request(PROMPT, 20, request_id="other", timeout_ms=9000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(c.stub, again)
        assert TandemError.from_rpc(caught.value).reason == "ENGINE_CRASH"
        assert sum(len(engine.calls) for engine in c.engines) == calls, "refused without trying"
        assert len((await collect(c.stub, request(list(range(1, 50)), 5))).ids[0]) == 5


async def test_full_and_draining_engines_are_retried_elsewhere() -> None:
    async with cluster(2) as c:
        for reason in ("ENGINE_FULL", "ENGINE_DRAINING"):
            for engine in c.engines:
                engine.config.refuse = [TandemError(reason, reason)]
                engine.calls.clear()
            result = await collect(c.stub, request(PROMPT, 5))
            assert len(result.ids[0]) == 5
            assert all(not engine.config.refuse for engine in c.engines) or c.engines[0].calls
            for engine in c.engines:
                engine.config.refuse.clear()
        assert all(view.failures == 0 for view in c.router.fleet.engines.values())


async def test_retries_are_bounded() -> None:
    async with cluster(4, eject_failures=100) as c:
        for engine in c.engines:
            engine.config.refuse = [TandemError("UNSPECIFIED", "gone", code=grpc.StatusCode.UNAVAILABLE)] * 9
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(c.stub, request(PROMPT, 5))
        error = TandemError.from_rpc(caught.value)
        assert (error.reason, error.code) == ("NO_ENGINE", grpc.StatusCode.UNAVAILABLE)
        assert sum(len(engine.calls) for engine in c.engines) == 3


async def test_size_limit_of_grpc_is_not_retried() -> None:
    async with cluster(2) as c:
        for engine in c.engines:
            engine.config.refuse = [TandemError("UNSPECIFIED", "too big", code=grpc.StatusCode.RESOURCE_EXHAUSTED)]
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(c.stub, request(PROMPT, 5))
        assert sum(len(engine.calls) for engine in c.engines) == 1


async def test_hung_engine_is_found_by_its_step_counter() -> None:
    async with cluster(2, SLOW, stall_limit_s=0.5) as c:
        hung: list[MockEngine] = []

        def hang(result: Result) -> None:
            if not hung and len(result.ids.get(0, ())) == 5:
                hung.append(busy(c))
                hung[0].hang()

        result = await collect(c.stub, request(PROMPT, 20), hang)
        assert result.ids[0] == expected(PROMPT, 20, result.accepted[0].seed)[0]
        view = c.router.fleet.engines[hung[0].address]
        await until(lambda: not view.hung)
        assert view.state == rpb.FLEET_STATE_SUSPECT, "cancelled work is no proof of health"
        hung[0].wake()
        await until(lambda: not view.excluded(time.monotonic()))
        await until_probed(c, view)
        assert view.state == rpb.FLEET_STATE_READY


async def until_probed(c: Cluster, view: Engine) -> None:
    """Sends requests until one has gone to the suspect engine."""
    for number in range(50):
        await collect(c.stub, request([number, *PROMPT], 2))
        if not view.failures:
            return


async def test_quiet_stream_is_not_hung() -> None:
    """A long prefill whose steps go on is no reason to give up."""
    async with cluster(1, MockConfig(prefill_s_per_token=0.015), stall_limit_s=0.4) as c:
        stepping = asyncio.create_task(_step(c.engines[0]))
        result = await collect(c.stub, request(PROMPT, 5))
        stepping.cancel()
        assert len(result.ids[0]) == 5
        assert len(c.engines[0].calls) == 1


async def _step(engine: MockEngine) -> None:
    while True:
        engine.steps += 1
        await asyncio.sleep(0.05)


async def test_memory_cap_for_resuming() -> None:
    async with cluster(2, SLOW, resume_max_bytes=200) as c:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(c.stub, request(PROMPT, 100), kill_at(c, 50))
        assert "memory" in (caught.value.details() or "")
        await until(lambda: c.router.inference.shared.kept.used == 0)


async def test_drain_moves_streams_and_loses_nothing() -> None:
    async with cluster(2, SLOW) as c:
        tasks = [asyncio.create_task(collect(c.stub, request([*PROMPT, i], 60))) for i in range(8)]
        await until(lambda: sum(engine.running for engine in c.engines) == 8)
        victim = max(c.engines, key=lambda engine: engine.running)
        async with rpc.channel(victim.address) as channel:
            await engine_pb2_grpc.EngineServiceStub(channel).Drain(epb.DrainRequest(grace_ms=100))
        for index, task in enumerate(tasks):
            result = await task
            assert result.ids[0] == expected([*PROMPT, index], 60, result.accepted[0].seed)[0]


async def test_rolling_restart_under_load() -> None:
    """Every engine is drained, stopped and started anew at its address; no request is lost."""
    async with cluster(3, MockConfig(step_s=0.004)) as c:
        stop = asyncio.Event()
        done: list[Result] = []

        async def client(number: int) -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                prompt = [number, turn, *PROMPT]
                result = await collect(c.stub, request(prompt, 40))
                assert result.ids[0] == expected(prompt, 40, result.accepted[0].seed)[0]
                done.append(result)

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        for index, engine in enumerate(list(c.engines)):
            async with rpc.channel(engine.address) as channel:
                await engine_pb2_grpc.EngineServiceStub(channel).Drain(epb.DrainRequest(grace_ms=50))
            await until(lambda engine=engine: engine.running == 0)
            await engine.stop()
            c.engines[index] = await MockEngine(engine.address, engine.config).start()
            view = c.router.fleet.engines[engine.address]
            await until(
                lambda i=index, view=view: view.last.epoch == c.engines[i].epoch and not view.excluded(time.monotonic())
            )
        stop.set()
        await asyncio.gather(*clients)
        assert len(done) >= 8


async def test_restart_at_the_same_address_voids_the_cache() -> None:
    async with cluster(1) as c:
        await collect(c.stub, request(PROMPT, 2))
        await until(lambda: c.engine().feed.indexed() == 6)
        address = c.engines[0].address
        await c.engines[0].kill()
        c.engines[0] = await MockEngine(address).start()
        await until(lambda: c.engine().last.epoch == c.engines[0].epoch and c.engine().feed.live)
        await until(lambda: c.engine().feed.indexed() == 0)
        assert len((await collect(c.stub, request(PROMPT, 2))).ids[0]) == 2


async def _process(tmp_path: Path, name: str) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.router.mock_engine",
        "--listen",
        f"unix:{tmp_path}/{name}",
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, (await process.stdout.readline()).decode().split()[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_real_processes_killed_and_stopped(tmp_path: Path, number: signal.Signals) -> None:
    processes = dict([reversed(await _process(tmp_path, name)) for name in ("a", "b")])  # type: ignore[misc]
    try:
        async with (
            router_for(",".join(processes), stall_limit_s=0.6) as router,
            rpc.channel(router.address) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await until(lambda: len(router.fleet.usable("mock")) == 2)
            hit = False

            def strike(result: Result) -> None:
                nonlocal hit
                if not hit and len(result.ids.get(0, ())) >= 5:
                    hit = True
                    os.kill(processes[result.accepted[0].engine].pid, number)

            result = await collect(stub, request(PROMPT, 30), strike)
            assert hit
            assert result.ids[0] == expected(PROMPT, 30, result.accepted[0].seed)[0]
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def test_two_routers_share_engines_and_one_restarts() -> None:
    async with cluster(2, SLOW) as c:
        addresses = ",".join(engine.address for engine in c.engines)
        async with router_for(addresses) as second, rpc.channel(second.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await until(lambda: len(second.fleet.usable("mock")) == 2)
            results = await asyncio.gather(
                *(collect(s, request([*PROMPT, i], 20)) for i in range(4) for s in (c.stub, stub))
            )
            assert all(len(result.ids[0]) == 20 for result in results)
        async with router_for(addresses) as third:
            await until(lambda: all(e.feed.live for e in third.fleet.engines.values()) and third.fleet.engines)
            held = {address: engine.feed.indexed() for address, engine in third.fleet.engines.items()}
            assert held == {engine.address: len(engine.cached) for engine in c.engines}


async def test_gateway_can_resume_at_another_router() -> None:
    """The helper works on what a gateway received from a router that is gone."""
    from tandem.resume import build_resume

    async with cluster(2, SLOW) as c:
        message = request(PROMPT, 20)
        call = c.stub.Generate(message)
        received = []
        result = Result()
        while len(result.ids.get(0, ())) < 7:
            response = await call.read()
            received.append(response.SerializeToString())
            result.take(response)
        call.cancel()
        again = build_resume(message, received)
        assert again is not None and again.attempt == 2
        async for response in c.stub.Generate(again):
            for event in response.events:
                if event.HasField("accepted"):
                    assert event.accepted.seed == result.accepted[0].seed
                    continue
                result.take(pb.GenerateResponse(events=[event]))
        assert result.ids[0] == expected(PROMPT, 20, result.accepted[0].seed)[0]
        assert result.usage[0].completion_tokens == 20
