"""Signals and start-up errors of the real process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from tandem import rpc
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tests.engine_service.server import ask

ROOT = Path(__file__).parents[2]


class Running:
    def __init__(self, process: asyncio.subprocess.Process, socket: Path) -> None:
        self.process = process
        self.socket = socket
        self.channel = rpc.channel(f"unix:{socket}")
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def ready(self) -> None:
        for _ in range(600):
            with contextlib.suppress(grpc.RpcError):
                if (await self.stub.ListModels(pb.ListModelsRequest())).models:
                    return
            await asyncio.sleep(0.05)
        raise AssertionError("it never was ready")

    async def ended(self, seconds: float) -> int:
        return await asyncio.wait_for(self.process.wait(), seconds)


@contextlib.asynccontextmanager
async def start(folder: Path, step_s: float, grace: float, stall_limit: float = 30.0) -> AsyncIterator[Running]:
    socket = folder / "e"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.engine_service.fake_process",
        f"unix:{socket}",
        str(step_s),
        str(grace),
        str(stall_limit),
        cwd=ROOT,
        stderr=asyncio.subprocess.DEVNULL,
    )
    running = Running(process, socket)
    try:
        await running.ready()
        yield running
    finally:
        await running.channel.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def read(call: grpc.aio.UnaryStreamCall) -> list[pb.GenerateEvent]:
    """All events. Raises TandemError."""
    events = []
    try:
        async for response in call:
            events.extend(response.events)
    except grpc.RpcError as error:
        raise TandemError.from_rpc(error) from error
    return events


async def test_sigterm_lets_requests_finish(short_tmp: Path) -> None:
    async with start(short_tmp, 0.1, 30) as running:
        assert stat.S_IMODE(running.socket.stat().st_mode) == 0o600
        call = running.stub.Generate(ask(stop=pb.StopConditions(max_tokens=10, ignore_eos=True)))
        await asyncio.sleep(0.2)
        running.process.send_signal(signal.SIGTERM)
        events = await read(call)
        assert events[-1].usage.completion_tokens == 10
        assert await running.ended(10) == 0


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT]])
async def test_end_of_grace_and_sigint_end_streams_with_a_status(short_tmp: Path, signals: list[int]) -> None:
    async with start(short_tmp, 0.1, 0.2) as running:
        call = running.stub.Generate(ask(stop=pb.StopConditions(max_tokens=100, ignore_eos=True)))
        await asyncio.sleep(0.3)
        started = time.monotonic()
        running.process.send_signal(signals[0])
        with pytest.raises(TandemError) as caught:
            await read(call)
        assert caught.value.reason == "ENGINE_DRAINING"
        assert await running.ended(10) == 0 and time.monotonic() - started < 10


async def test_a_hung_step_does_not_keep_the_process(short_tmp: Path) -> None:
    async with start(short_tmp, 600, 0.2) as running:
        call = running.stub.Generate(ask())
        await asyncio.sleep(0.3)
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(TandemError):
            await read(call)
        assert await running.ended(10) == 0


async def test_second_sigint_ends_at_once(short_tmp: Path) -> None:
    async with start(short_tmp, 600, 60) as running:
        call = running.stub.Generate(ask())
        await asyncio.sleep(0.3)
        running.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        running.process.send_signal(signal.SIGINT)
        assert await running.ended(2) == 130
        call.cancel()


async def test_address_in_use_and_bad_model_are_one_line_and_a_code(short_tmp: Path) -> None:
    async def run(code: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        _out, err = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode or 0, err.decode()

    begin = "import sys; from engine_service.main import run; from engine_service.settings import EngineSettings as S; "
    code, told = await run(begin + "sys.exit(run(S(listen='256.1.1.1:70')))")
    assert code == 2 and "256.1.1.1:70" in told and "Traceback" not in told
    code, told = await run(begin + f"sys.exit(run(S(listen='unix:{short_tmp}/x', model='{short_tmp}/missing.gguf')))")
    assert code == 1 and "missing.gguf" in told and "Traceback" not in told


async def test_a_stopped_process_goes_on_where_it_was(short_tmp: Path) -> None:
    """A container that was paused has no hung step, and fails no request when it runs again."""
    async with start(short_tmp, 0.1, 30, stall_limit=1.0) as running:
        call = running.stub.Generate(ask(stop=pb.StopConditions(max_tokens=15, ignore_eos=True)))
        await asyncio.sleep(0.3)
        running.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.5)
        running.process.send_signal(signal.SIGCONT)
        assert sum(len(event.delta.ids) for event in await read(call)) == 15
