"""The memory plan of the log, against what a real engine process holds under load."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path

import psutil
import pytest

from tandem import rpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc

KV_BYTES = 64 << 20
TOLERANCE = 0.10
STREAMS = 12
# Requests of each stream; together several times the KV cache.
LEAST = 3


async def _plan(log: asyncio.StreamReader) -> dict[str, int]:
    async for line in log:
        entry = json.loads(line)
        if entry["message"] == "engine is ready":
            return {name: entry[f"{name}_bytes"] for name in ("weight", "kv", "workspace", "base")}
    raise AssertionError("the engine ended before it was ready")


async def _client(stub: inference_pb2_grpc.InferenceServiceStub, number: int, until: float) -> int:
    """Requests of all kinds, one after another: some at least, and on until then. Returns how many tokens came."""
    draw, count, sent = random.Random(number), 0, 0
    while sent < LEAST or time.monotonic() < until:
        sent += 1
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[draw.randrange(100, 40_000) for _ in range(draw.randrange(20, 400))]),
            sampling=pb.SamplingParams(temperature=draw.choice((0.0, 1.0)), top_p=0.9, seed=number),
            stop=pb.StopConditions(max_tokens=draw.randrange(1, 48), ignore_eos=True),
            output=pb.OutputOptions(logprobs=draw.choice((0, 5))),
        )
        async for response in stub.Generate(request):
            count += sum(len(event.delta.ids) for event in response.events)
    return count


async def _peak(process: psutil.Process, clients: asyncio.Future[list[int]]) -> int:
    peak = 0
    while not clients.done():
        peak = max(peak, process.memory_info().rss)
        await asyncio.sleep(0.05)
    return peak


async def _load(folder: Path, seconds: float) -> tuple[dict[str, int], int, int]:
    """Runs an engine under load; its plan, its peak of resident bytes, and the tokens that it made."""
    listen = f"unix:{folder / 'e'}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem.cli", "engine", "--listen", listen),
        *("--kv-cache-bytes", str(KV_BYTES), "--max-num-seqs", "8", "--grace", "0", "--stall-limit", "120"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    try:
        plan = await asyncio.wait_for(_plan(process.stderr), 60)
        reader = asyncio.create_task(process.stderr.read())
        channel = rpc.channel(listen)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        until = time.monotonic() + seconds
        clients = asyncio.gather(*(_client(stub, number, until) for number in range(STREAMS)))
        peak = await _peak(psutil.Process(process.pid), clients)
        tokens = await clients
        await channel.close()
        reader.cancel()
        return plan, peak, sum(tokens)
    finally:
        process.terminate()
        await process.wait()


def _check(folder: Path, seconds: float) -> None:
    plan, peak, tokens = asyncio.run(_load(folder, seconds))
    total = sum(plan.values())
    assert tokens > 100, "there was load"
    assert abs(peak - total) < TOLERANCE * total, f"peak {peak >> 20} MiB, planned {total >> 20} MiB: {plan}"


def test_peak_memory_is_what_the_plan_says(short_dir: Path) -> None:
    _check(short_dir, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_peak_memory_in_ten_minutes(short_dir: Path) -> None:
    _check(short_dir, 600)
