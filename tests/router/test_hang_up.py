"""Clients that leave, on real processes: router, engine (real but for its model) and draft service.

What must be free again is asked of the processes themselves: the router's queue, the engine's batch, queue and KV
blocks, the draft's sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tandem import rpc
from tandem.draft.v1 import draft_pb2 as dpb
from tandem.draft.v1 import draft_pb2_grpc
from tandem.engine.v1 import engine_pb2 as epb
from tandem.engine.v1 import engine_pb2_grpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.router.v1 import router_pb2 as rpb
from tandem.router.v1 import router_pb2_grpc

START_S = 90.0
LIMIT_S = 20.0


@dataclass
class Holdings:
    """What three processes hold for clients."""

    queued: int
    running: int
    waiting: int
    kv_blocks: int
    drafted: int

    @property
    def none(self) -> bool:
        return not (self.queued or self.running or self.waiting or self.kv_blocks or self.drafted)


class Chain:
    """Router, engine and draft, each a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[asyncio.subprocess.Process] = []
        self._channels = {name: rpc.channel(self.address(name)) for name in ("r", "a", "e", "d")}
        self.stub = inference_pb2_grpc.InferenceServiceStub(self._channels["r"])
        self._admin = router_pb2_grpc.RouterAdminServiceStub(self._channels["a"])
        self._engine = engine_pb2_grpc.EngineServiceStub(self._channels["e"])
        self._draft = draft_pb2_grpc.DraftServiceStub(self._channels["d"])

    def address(self, name: str) -> str:
        return f"unix:{self._folder}/{name}"

    async def start(self) -> None:
        tandem = ["-m", "tandem.cli"]
        quiet = ["--log-level", "warning"]
        router = ["--listen", self.address("r"), "--admin-listen", self.address("a"), "--engines", self.address("e")]
        for command in (
            [*tandem, "draft", "--listen", self.address("d"), "--proposers", "ngram", *quiet],
            ["-m", "tests.router.engine_process", "--listen", self.address("e"), "--draft", self.address("d")],
            [*tandem, "router", *router, "--load-interval-ms", "50", *quiet],
        ):
            self._processes.append(await asyncio.create_subprocess_exec(sys.executable, *command))
        await self.until(self._ready, START_S)

    async def stop(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ready(self) -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            listed = (await self.stub.ListModels(pb.ListModelsRequest())).models
            await self._draft.GetDraftInfo(dpb.GetDraftInfoRequest())
            return bool(listed)
        return False

    async def until(self, condition: Callable[[], Coroutine[Any, Any, bool]], limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not await condition():
            assert time.monotonic() < end, "it never came true"
            await asyncio.sleep(0.01)

    async def report(self) -> epb.WatchLoadResponse:
        call = self._engine.WatchLoad(epb.WatchLoadRequest())
        report = await call.read()
        call.cancel()
        return report

    async def holdings(self) -> Holdings:
        report = await self.report()
        info = await self._draft.GetDraftInfo(dpb.GetDraftInfoRequest())
        listed = await self._admin.ListEngines(rpb.ListEnginesRequest())
        return Holdings(listed.queued, report.running, report.waiting, report.kv_blocks_used, info.sequences)

    async def sees(self, condition: Callable[[Holdings], bool]) -> Holdings:
        """Waits until what is held is as said; returns it."""
        seen: list[Holdings] = []

        async def holds() -> bool:
            seen.append(await self.holdings())
            return condition(seen[-1])

        try:
            await self.until(holds)
        except AssertionError as error:
            raise AssertionError(f"{error}; held at the end: {seen[-1]}") from None
        return seen[-1]

    def ask(self, number: int, prompt: int = 40, tokens: int = 10_000) -> Any:
        """A call that would run for minutes."""
        ids = [(7 * number + index) % 250 + 3 for index in range(prompt)]
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
        request.stop.max_tokens = tokens
        request.stop.ignore_eos = True
        return self.stub.Generate(request)


@contextlib.asynccontextmanager
async def chain(folder: Path) -> AsyncIterator[Chain]:
    result = Chain(folder)
    try:
        await result.start()
        yield result
    finally:
        await result.stop()


async def decoding(call: Any, tokens: int) -> None:
    """Reads until so many tokens have come."""
    seen = 0
    while seen < tokens:
        response = await call.read()
        seen += sum(len(event.delta.ids) for event in response.events)


async def test_a_client_that_leaves_frees_all_that_was_held_for_it(short_dir: Path) -> None:
    async with chain(short_dir) as c:
        # In decode.
        call = c.ask(1)
        await decoding(call, 5)
        held = await c.sees(lambda held: held.drafted == 1)
        assert held.running == 1 and held.kv_blocks >= 3
        call.cancel()
        await c.sees(lambda held: held.none)

        # In prefill: 190 steps of 64 tokens.
        call = c.ask(2, prompt=12_000, tokens=100)
        await call.read()
        held = await c.sees(lambda held: held.running == 1 and held.kv_blocks > 0)
        assert (await c.report()).uncached_waiting_tokens > 0, "still in prefill"
        call.cancel()
        await c.sees(lambda held: held.none)

        # Queued: two run, the third waits in the engine, the fourth in the router.
        calls = [c.ask(number) for number in (3, 4)]
        for call in calls:
            await decoding(call, 2)
        calls.append(c.ask(5))
        await c.sees(lambda held: held.waiting == 1)
        calls.append(c.ask(6))
        await c.sees(lambda held: held.queued == 1)
        calls.pop().cancel()
        held = await c.sees(lambda held: held.queued == 0)
        assert (held.running, held.waiting) == (2, 1), "only the one who left is gone"
        calls.pop().cancel()
        held = await c.sees(lambda held: held.waiting == 0)
        assert held.running == 2
        for call in calls:
            call.cancel()
        await c.sees(lambda held: held.none)
