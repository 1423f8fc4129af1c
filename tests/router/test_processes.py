"""The router as a process before engine processes: killed before the first token, slow, late, replaced in turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem import rpc
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.router.v1 import router_pb2 as rpb
from tandem.router.v1 import router_pb2_grpc
from tests.router.harness import Result, collect, request, until
from tests.router.mock_engine import expected

START_S = 90.0
PROMPT = list(range(100))


class Site:
    """A router process and engine processes, by name."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder = folder
        self.names = names
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._channels = [rpc.channel(self.address(name)) for name in ("r", "a")]
        self.stub = inference_pb2_grpc.InferenceServiceStub(self._channels[0])
        self.admin = router_pb2_grpc.RouterAdminServiceStub(self._channels[1])

    def address(self, name: str) -> str:
        return f"unix:{self.folder}/{name}"

    async def run(self, name: str, *command: str) -> None:
        self.processes[name] = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.DEVNULL
        )

    async def mock(self, name: str, *more: str) -> None:
        await self.run(name, "-m", "tests.router.mock_engine", "--listen", self.address(name), *more)

    async def real(self, name: str) -> None:
        """A real engine over a fake model; it drains on SIGTERM."""
        more = ["--draft", self.address("no-draft"), "--max-num-seqs", "16", "--max-waiting", "16"]
        await self.run(name, "-m", "tests.router.engine_process", "--listen", self.address(name), *more)

    async def router(self) -> None:
        engines = ",".join(self.address(name) for name in self.names)
        where = ["--listen", self.address("r"), "--admin-listen", self.address("a"), "--engines", engines]
        more = ["--load-interval-ms", "50", "--log-level", "warning"]
        await self.run("r", "-m", "tandem.cli", "router", *where, *more)

    async def ready(self, count: int) -> None:
        """Waits until so many engines are ready."""
        end = time.monotonic() + START_S
        while await self._ready() < count:
            assert time.monotonic() < end, f"{count} engines were never ready"
            await asyncio.sleep(0.05)

    async def _ready(self) -> int:
        try:
            engines = (await self.admin.ListEngines(rpb.ListEnginesRequest())).engines
        except grpc.aio.AioRpcError:
            return 0
        return sum(engine.state == rpb.FLEET_STATE_READY for engine in engines)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def site(folder: Path, *names: str) -> AsyncIterator[Site]:
    result = Site(folder, names)
    try:
        await result.router()
        yield result
    finally:
        await result.close()


async def test_killed_before_the_first_token(short_dir: Path) -> None:
    async with site(short_dir, "e0", "e1") as s:
        for name in s.names:
            await s.mock(name, "--prefill-s-per-token", "0.01")
        await s.ready(2)
        struck: list[str] = []

        def strike(result: Result) -> None:
            if result.accepted and not struck:
                assert not result.ids, "the prompt takes a second"
                struck.append(result.accepted[0].engine)
                s.processes[struck[0].rpartition("/")[2]].kill()

        result = await collect(s.stub, request(PROMPT, 20), strike)
        assert struck
        assert result.ids[0] == expected(PROMPT, 20, result.accepted[0].seed)[0]
        assert len(result.accepted) == 1, "the client sees one stream"


async def test_an_engine_ten_times_slower_gets_less(short_dir: Path) -> None:
    async with site(short_dir, "e0", "e1") as s:
        await s.mock("e0", "--prefill-s-per-token", "0.0002")
        await s.mock("e1", "--prefill-s-per-token", "0.002", "--step-s", "0.1")
        await s.ready(2)

        async def client(number: int) -> list[str]:
            used = []
            for turn in range(10):
                prompt = [number, turn, *PROMPT]
                result = await collect(s.stub, request(prompt, 4))
                assert result.ids[0] == expected(prompt, 4, result.accepted[0].seed)[0]
                used.append(result.accepted[0].engine)
            return used

        used = Counter(engine for one in await asyncio.gather(*map(client, range(4))) for engine in one)
        fast, slow = used[s.address("e0")], used[s.address("e1")]
        assert fast > 3 * slow, used


async def test_deadlines_hold_across_processes(short_dir: Path) -> None:
    async with site(short_dir, "e0") as s:
        await s.mock("e0", "--prefill-s-per-token", "0.05", "--max-num-seqs", "1", "--max-waiting", "0")
        await s.ready(1)
        # At the engine, in prefill; at the router, in its queue.
        first = asyncio.create_task(collect(s.stub, request(PROMPT, 4, timeout_ms=900)))
        await asyncio.sleep(0.3)
        with pytest.raises(grpc.aio.AioRpcError) as queued:
            await collect(s.stub, request(PROMPT, 4, timeout_ms=300))
        with pytest.raises(grpc.aio.AioRpcError) as running:
            await first
        for caught in (queued, running):
            assert TandemError.from_rpc(caught.value).reason == "DEADLINE"
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.slow
async def test_engines_are_replaced_in_turn_under_load(short_dir: Path) -> None:
    async with site(short_dir, "e0", "e1") as s:
        for name in s.names:
            await s.real(name)
        await s.ready(2)
        stop = asyncio.Event()
        done: list[int] = []

        def ask(number: int) -> pb.GenerateRequest:
            made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[number + 5, *range(10, 60)]))
            made.sampling.temperature = 0
            made.stop.max_tokens = 60
            made.stop.ignore_eos = True
            return made

        calm = [(await collect(s.stub, ask(number))).ids[0] for number in range(4)]

        async def client(number: int) -> None:
            while not stop.is_set():
                result = await collect(s.stub, ask(number))
                assert result.ids[0] == calm[number]
                done.append(number)

        clients: list[asyncio.Task[Any]] = [asyncio.create_task(client(number)) for number in range(4)]
        for name in s.names:
            process = s.processes[name]
            os.kill(process.pid, signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), START_S) == 0
            served = len(done)
            await until(lambda served=served: len(done) >= served + 4, START_S)
            await s.real(name)
            await s.ready(2)
        stop.set()
        await asyncio.gather(*clients)
        assert set(done) == set(range(4))
