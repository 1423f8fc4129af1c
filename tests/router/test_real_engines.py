"""Real engines behind the router: a stream whose engine is killed ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.server import RouterServer
from tandem import rpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tests.router.harness import Result, collect, router_for, until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28]
READY_S = 240.0
SCHEMA = '{"type":"object","properties":{"a":{"type":"string"},"b":{"type":"integer"}},"required":["a","b"]}'


@dataclass
class Pair:
    """Two engine processes and a router."""

    folder: Path
    router: RouterServer
    stub: Any
    processes: dict[str, subprocess.Popen[bytes]]

    def start(self, name: str) -> None:
        address = f"unix:{self.folder}/{name}"
        self.processes[address] = launch(address)

    async def ready(self, count: int) -> None:
        await until(
            lambda: sum(len(self.router.fleet.usable(m.name)) for m in self.router.fleet.models()) >= count, READY_S
        )


def launch(address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tandem.cli", "engine", "--listen", address, "--model", "smollm2-135m-instruct"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--threads", "1", "--log-level", "warning", "--kv-cache-bytes", str(128 << 20)], env=environment
    )


@contextlib.asynccontextmanager
async def two_engines(folder: Path) -> AsyncIterator[Pair]:
    addresses = [f"unix:{folder}/{name}" for name in ("e0", "e1")]
    async with router_for(",".join(addresses), stall_limit_s=60) as router, rpc.channel(router.address) as channel:
        pair = Pair(folder, router, inference_pb2_grpc.InferenceServiceStub(channel), {})
        try:
            for name in ("e0", "e1"):
                pair.start(name)
            await pair.ready(2)
            yield pair
        finally:
            for process in pair.processes.values():
                process.kill()
                process.wait()


def shapes() -> dict[str, pb.GenerateRequest]:
    """Requests by name. Each has its seed, so that a second run must give the same."""

    def new() -> pb.GenerateRequest:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
        request.stop.max_tokens = 40
        request.stop.ignore_eos = True
        request.sampling.temperature = 0
        request.sampling.seed = 1
        return request

    result = {name: new() for name in ("greedy", "seeded", "n2", "schema", "logprobs", "penalties", "stop")}
    for name in ("seeded", "n2", "penalties"):
        result[name].sampling.temperature = 1
        result[name].sampling.seed = 77
    result["n2"].n = 2
    result["schema"].stop.ignore_eos = False
    result["schema"].structured.json_schema = SCHEMA
    result["logprobs"].output.logprobs = 2
    result["penalties"].sampling.repetition_penalty = 1.2
    result["penalties"].sampling.presence_penalty = 0.5
    result["stop"].stop.stop.append("zzzz never zzzz")
    return result


async def test_killed_engines_change_nothing(short_dir: Path) -> None:
    async with two_engines(short_dir) as pair:
        for name, request in shapes().items():
            calm = await collect(pair.stub, request)
            struck: list[str] = []

            def strike(result: Result, struck: list[str] = struck) -> None:
                if not struck and len(result.ids.get(0, ())) >= 8 and not result.usage:
                    struck.append(result.accepted[0].engine)
                    process = pair.processes[next(a for a in pair.processes if a.endswith(struck[0][-2:]))]
                    os.kill(process.pid, signal.SIGKILL)

            stormy = await collect(pair.stub, request, strike)
            assert struck, f"{name}: the stream was over before the engine could be killed"
            assert stormy.ids == calm.ids, name
            assert stormy.text == calm.text, name
            assert stormy.logprobs == calm.logprobs, name
            assert sorted(stormy.finished) == sorted(calm.finished), name
            assert stormy.usage[0].completion_tokens == calm.usage[0].completion_tokens, name
            assert stormy.usage[0].prompt_tokens == len(PROMPT), name
            pair.start(struck[0][-2:])
            await asyncio.sleep(0.5)
            await pair.ready(2)
