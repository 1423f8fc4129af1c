"""Two real engines behind one router: prefill computed, hit rate and TTFT by policy, in one run.

The workload is conversations of several turns that share a system prompt per group. Policies take turns on the same
processes, and every turn starts with empty caches.

    python -m benchmarks.router_real --sessions 12 --turns 4 --policies round_robin prefix_exact
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from router.settings import POLICIES
from tandem import rpc
from tandem.engine.v1 import engine_pb2 as epb
from tandem.engine.v1 import engine_pb2_grpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.router.v1 import router_pb2 as rpb
from tandem.router.v1 import router_pb2_grpc

READY_S = 180.0


@dataclass(frozen=True)
class Row:
    """One policy. Tokens of all engines together, times in milliseconds."""

    policy: str
    requests: int
    prompt_tokens: int
    prefill_tokens: int
    hit_rate: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    seconds: float
    per_engine: tuple[int, ...]


def launch(options: argparse.Namespace, folder: str) -> tuple[list[subprocess.Popen[bytes]], list[str]]:
    """Starts the engines and the router."""
    tandem = [sys.executable, "-m", "tandem.cli"]
    engines = [f"unix:{folder}/e{number}" for number in range(options.engines)]
    processes = [
        subprocess.Popen(
            [
                *tandem,
                "engine",
                *("--listen", address, "--model", options.model, "--threads", str(options.threads)),
                *("--log-level", "warning", "--kv-cache-bytes", str(options.kv_mb << 20)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        )
        for address in engines
    ]
    processes.append(
        subprocess.Popen(
            [
                *tandem,
                "router",
                *("--listen", f"unix:{folder}/r", "--admin-listen", f"unix:{folder}/a"),
                *("--engines", ",".join(engines), "--log-level", "warning"),
            ]
        )
    )
    return processes, engines


def conversations(options: argparse.Namespace, seed: int) -> list[list[list[int]]]:
    """Per session the new token ids of each turn; the first turn begins with its group's system prompt."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000, 40_000) for _ in range(count)]

    systems = [ids(options.system_tokens) for _ in range(options.groups)]
    return [
        [
            (systems[number % len(systems)] if turn == 0 else []) + ids(options.user_tokens)
            for turn in range(options.turns)
        ]
        for number in range(options.sessions)
    ]


async def talk(stub: Any, turns: list[list[int]], options: argparse.Namespace, gate: asyncio.Semaphore) -> list[Any]:
    """One conversation; returns (seconds to first token, prompt tokens, cached tokens) per turn."""
    history: list[int] = []
    rows = []
    for new in turns:
        history += new
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=history))
        request.sampling.temperature = 0
        request.stop.max_tokens = options.output_tokens
        request.stop.ignore_eos = True
        async with gate:
            began, first, cached = time.perf_counter(), 0.0, 0
            async for response in stub.Generate(request):
                for event in response.events:
                    if event.HasField("delta"):
                        first = first or time.perf_counter() - began
                        history += event.delta.ids
                    elif event.HasField("usage"):
                        cached = event.usage.cached_tokens
        rows.append((first, len(history) - options.output_tokens, cached))
    return rows


async def wait_ready(admin: Any, count: int) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        try:
            engines = (await admin.ListEngines(rpb.ListEnginesRequest())).engines
            if sum(engine.state == rpb.FLEET_STATE_READY and engine.events_live for engine in engines) == count:
                return
        except Exception:
            pass
        await asyncio.sleep(0.25)
    raise TimeoutError(f"{count} engines were not ready within {READY_S:g} s")


async def run_policy(policy: str, stubs: dict[str, Any], options: argparse.Namespace, seed: int) -> Row:
    admin = stubs["admin"]
    for engine in stubs["engines"]:
        await engine.ResetPrefixCache(epb.ResetPrefixCacheRequest())
    await admin.UpdateRoutingConfig(rpb.UpdateRoutingConfigRequest(config=rpb.RoutingConfig(policy=policy)))
    await asyncio.sleep(0.6)
    before = await counters(admin)
    gate = asyncio.Semaphore(options.concurrency)
    began = time.perf_counter()
    results = await asyncio.gather(
        *(talk(stubs["inference"], turns, options, gate) for turns in conversations(options, seed))
    )
    seconds = time.perf_counter() - began
    await asyncio.sleep(0.6)
    after = await counters(admin)
    rows = [row for session in results for row in session]
    ttfts = sorted(1000 * row[0] for row in rows)
    computed = [late - early for early, late in zip(before, after, strict=True)]
    prompt = sum(row[1] for row in rows)
    return Row(
        policy,
        len(rows),
        prompt,
        sum(computed),
        round(sum(row[2] for row in rows) / prompt, 4),
        round(statistics.median(ttfts), 1),
        round(ttfts[int(0.99 * (len(ttfts) - 1))], 1),
        round(seconds, 1),
        tuple(computed),
    )


async def counters(admin: Any) -> list[int]:
    """Prompt tokens that each engine has computed since its start."""
    engines = (await admin.ListEngines(rpb.ListEnginesRequest())).engines
    return [engine.load.prefill_tokens for engine in engines]


async def compare(options: argparse.Namespace, folder: str, addresses: list[str]) -> list[Row]:
    channels = [rpc.channel(address) for address in (f"unix:{folder}/a", f"unix:{folder}/r", *addresses)]
    try:
        stubs: dict[str, Any] = {
            "admin": router_pb2_grpc.RouterAdminServiceStub(channels[0]),
            "inference": inference_pb2_grpc.InferenceServiceStub(channels[1]),
            "engines": [engine_pb2_grpc.EngineServiceStub(channel) for channel in channels[2:]],
        }
        await wait_ready(stubs["admin"], len(addresses))
        rows = []
        for turn in range(options.rounds):
            for policy in options.policies:
                rows.append(await run_policy(policy, stubs, options, seed=turn))
        return rows
    finally:
        for channel in channels:
            await channel.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Real engines behind the router, by policy.")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=1, help="threads per engine")
    parser.add_argument("--kv-mb", type=int, default=512, help="KV cache of each engine, MiB")
    parser.add_argument("--policies", nargs="+", default=["round_robin", "prefix_exact"], choices=POLICIES)
    parser.add_argument("--rounds", type=int, default=1, help="turns of each policy")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--groups", type=int, default=3, help="different system prompts")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at once")
    parser.add_argument("--system-tokens", type=int, default=384)
    parser.add_argument("--user-tokens", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tr", dir="/tmp") as folder:
        processes, addresses = launch(options, folder)
        try:
            rows = asyncio.run(compare(options, folder, addresses))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(40)
    print(f"{'policy':16}{'requests':>9}{'prompt':>9}{'computed':>10}{'hits':>8}{'TTFT p50':>10}{'p99 ms':>9}{'s':>7}")
    for row in rows:
        print(
            f"{row.policy:16}{row.requests:9d}{row.prompt_tokens:9d}{row.prefill_tokens:10d}{row.hit_rate:8.1%}"
            f"{row.ttft_p50_ms:10.1f}{row.ttft_p99_ms:9.1f}{row.seconds:7.1f}  per engine {row.per_engine}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
