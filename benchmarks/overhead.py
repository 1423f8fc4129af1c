"""What the router costs: added latency and CPU per forwarded token, against calling the engine directly.

The engine is a mock process that streams TOKENS tokens STEP ms apart (all its streams in step, as a real engine's are).
Every number of streams is measured directly and through the router, in turns, in one run.

    python -m benchmarks.overhead --streams 1 16 64 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from tandem import rpc
from tandem.engine.v1 import engine_pb2 as epb
from tandem.engine.v1 import engine_pb2_grpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc

MODEL = "mock"


@dataclass(frozen=True)
class Row:
    """One cell of the table. Times in milliseconds, CPU in microseconds of the router process."""

    path: str
    streams: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    cpu_us_per_token: float
    messages_per_token: float


class BenchEngine(engine_pb2_grpc.EngineServiceServicer):
    """Streams prepared bytes in step; costs as little as a Python server can."""

    def __init__(self, tokens: int, step_s: float) -> None:
        self._tokens = tokens
        self._step_s = step_s
        self._tick = asyncio.Condition()

    async def beat(self) -> None:
        """The step loop: wakes all streams at once."""
        due = time.monotonic()
        while True:
            due = max(due + self._step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            async with self._tick:
                self._tick.notify_all()

    async def _next(self) -> None:
        async with self._tick:
            await self._tick.wait()

    async def generate(self, raw: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        accepted = pb.GenerateEvent(accepted=pb.Accepted(seed=1, prompt_tokens=100, numerics_id="bench"))
        yield pb.GenerateResponse(events=[accepted]).SerializeToString()
        for number in range(self._tokens):
            await self._next()
            delta = pb.Delta(token_offset=number, text_offset=6 * number, ids=[number + 1000], text=" token")
            yield pb.GenerateResponse(events=[pb.GenerateEvent(delta=delta)]).SerializeToString()
        finished = pb.GenerateEvent(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH))
        usage = pb.GenerateEvent(usage=pb.Usage(prompt_tokens=100, completion_tokens=self._tokens))
        yield pb.GenerateResponse(events=[finished, usage]).SerializeToString()

    async def WatchLoad(
        self, request: epb.WatchLoadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[epb.WatchLoadResponse]:
        sequence = 0
        while True:
            sequence += 1
            yield epb.WatchLoadResponse(
                epoch=1,
                sequence=sequence,
                state=epb.ENGINE_STATE_READY,
                steps=sequence,
                model=pb.ModelInfo(name=MODEL, block_size=16, max_model_len=8192, numerics_id="bench"),
                max_num_seqs=256,
                kv_blocks_total=10_000,
            )
            await asyncio.sleep((request.interval_ms or 250) / 1000)


async def serve_engine(address: str, tokens: int, step_s: float) -> None:
    server, health = rpc.server()
    engine = BenchEngine(tokens, step_s)
    handler: Any = grpc.unary_stream_rpc_method_handler(engine.generate)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tandem.inference.v1.InferenceService", {"Generate": handler}),)
    )
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)
    server.add_insecure_port(address)
    await health.set(True)
    await server.start()
    await engine.beat()


async def one_stream(stub: inference_pb2_grpc.InferenceServiceStub, number: int) -> tuple[float, list[float], int]:
    """Returns seconds to the first token, gaps between messages, and the number of messages with tokens."""
    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=range(number, number + 100)))
    request.stop.max_tokens = 64
    began = time.perf_counter()
    first, last, gaps, messages = 0.0, 0.0, [], 0
    async for response in stub.Generate(request):
        now = time.perf_counter()
        if any(event.HasField("delta") for event in response.events):
            messages += 1
            if first:
                gaps.append(now - last)
            first, last = first or now - began, now
    return first, gaps, messages


async def client(stub: inference_pb2_grpc.InferenceServiceStub, number: int, rounds: int, offset_s: float) -> list[Any]:
    """One client that asks again as soon as it has its answer; clients start a little apart."""
    await asyncio.sleep(offset_s)
    return [await one_stream(stub, 1000 * number + turn) for turn in range(rounds)]


async def measure(address: str, path: str, streams: int, rounds: int, tokens: int, router_pid: int) -> Row:
    """Runs `streams` clients of `rounds` requests each."""
    process = psutil.Process(router_pid)
    ttfts: list[float] = []
    gaps: list[float] = []
    messages = 0
    async with rpc.channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        # Warm-up: connections, and the router's view of its own load.
        await asyncio.gather(*(one_stream(stub, number) for number in range(streams)))
        before = process.cpu_times()
        spread = 0.05 / streams
        results = await asyncio.gather(*(client(stub, n, rounds, n * spread) for n in range(streams)))
        for first, between, count in (stream for one in results for stream in one):
            ttfts.append(first)
            gaps.extend(between)
            messages += count
        after = process.cpu_times()
    made = rounds * streams * tokens
    cpu = (after.user - before.user) + (after.system - before.system)
    ttfts.sort()
    return Row(
        path=path,
        streams=streams,
        ttft_p50_ms=round(1000 * statistics.median(ttfts), 2),
        ttft_p99_ms=round(1000 * ttfts[int(0.99 * (len(ttfts) - 1))], 2),
        gap_p50_ms=round(1000 * statistics.median(gaps), 2) if gaps else 0.0,
        cpu_us_per_token=round(1e6 * cpu / made, 1),
        messages_per_token=round(messages / made, 3),
    )


async def wait_ready(address: str, limit_s: float = 30.0) -> None:
    """Waits until a model is listed."""
    async with rpc.channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            try:
                if (await stub.ListModels(pb.ListModelsRequest())).models:
                    return
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(0.1)
    raise TimeoutError(f"{address} lists no model after {limit_s:g} s")


def start(engine: str, router: str, options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Starts the engine and the router as processes of their own."""
    me = [sys.executable, "-m", "benchmarks.overhead"]
    step, tokens = str(options.step_ms), str(options.tokens)
    return [
        subprocess.Popen([*me, "--engine", engine, "--tokens", tokens, "--step-ms", step]),
        subprocess.Popen([*me, "--router", router, "--engines", engine, "--policy", options.policy]),
    ]


async def compare(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        engine, router = f"unix:{folder}/e", f"unix:{folder}/r"
        children = start(engine, router, options)
        try:
            await wait_ready(router)
            for streams in options.streams:
                for path, address in (("direct", engine), ("router", router)):
                    rows.append(await measure(address, path, streams, options.rounds, options.tokens, children[1].pid))
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait(10)
    return rows


def serve_router(address: str, engines: str, policy: str) -> int:
    from router.main import run
    from router.settings import RouterSettings

    return run(RouterSettings(listen=address, admin_listen="", engines=engines, policy=policy, log_level="warning"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], help="numbers of concurrent streams")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each client")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per stream")
    parser.add_argument("--step-ms", type=float, default=5.0, help="milliseconds between tokens")
    parser.add_argument("--policy", default="prefix_exact", help="routing policy")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--router", help=argparse.SUPPRESS)
    parser.add_argument("--engines", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        asyncio.run(serve_engine(options.engine, options.tokens, options.step_ms / 1000))
        return 0
    if options.router:
        return serve_router(options.router, options.engines, options.policy)
    rows = asyncio.run(compare(options))
    print(f"{'path':8}{'streams':>8}{'TTFT p50':>10}{'p99 ms':>9}{'gap p50':>9}{'CPU µs/token':>14}{'msgs/token':>12}")
    for row in rows:
        print(
            f"{row.path:8}{row.streams:8d}{row.ttft_p50_ms:10.2f}{row.ttft_p99_ms:9.2f}{row.gap_p50_ms:9.2f}"
            f"{row.cpu_us_per_token:14.1f}{row.messages_per_token:12.3f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
