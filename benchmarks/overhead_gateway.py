"""What the gateway costs: CPU per request and per streamed token, and added latency, against gRPC to the same engine.

The engine is the mock of benchmarks.overhead, in a process of its own; the client speaks plain HTTP/1.1 over sockets.

    python -m benchmarks.overhead_gateway --streams 1 16 64 --rounds 3
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.overhead import BenchEngine, wait_ready
from benchmarks.overhead import client as grpc_client
from tandem import rpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc

MODEL = "mock"


@dataclass(frozen=True)
class Row:
    """One cell of the table. Times in milliseconds, CPU in microseconds of the gateway process."""

    path: str
    streams: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    cpu_us_per_token: float
    cpu_us_per_request: float
    requests_per_s: float


class Engine(inference_pb2_grpc.InferenceServiceServicer):
    """Lists one model and hands out the default model's tokenizer; Generate is the prepared bytes of BenchEngine."""

    def __init__(self, bench: BenchEngine) -> None:
        from tandem.models.store import resolve
        from tandem.tokenizer import load_bundle

        self._bench = bench
        self._bundle = load_bundle(resolve("smollm2-135m-instruct").path)
        self._info = pb.ModelInfo(
            name=MODEL, tokenizer_digest=self._bundle.digest, max_model_len=8192, vocab_size=49152, numerics_id="bench"
        )

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._info])

    async def GetTokenizer(self, request: Any, context: Any) -> pb.GetTokenizerResponse:
        return self._bundle.to_proto()

    async def Generate(self, request: Any, context: Any) -> Any:
        async for data in self._bench.generate(b"", context):
            yield pb.GenerateResponse.FromString(data)


async def serve_engine(address: str, tokens: int, step_s: float) -> None:
    server, health = rpc.server()
    bench = BenchEngine(tokens, step_s)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Engine(bench), server)
    server.add_insecure_port(address)
    await health.set(True)
    await server.start()
    await bench.beat()


def _request(number: int, stream: bool, tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{number} " + "word " * 100}],
            "stream": stream,
            "max_tokens": tokens,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def http_client(port: int, number: int, rounds: int, stream: bool, tokens: int, offset_s: float) -> list[float]:
    """Seconds to the first content of each request of one client (to the whole answer if not streamed)."""
    await asyncio.sleep(offset_s)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    firsts = []
    for turn in range(rounds):
        began = time.perf_counter()
        writer.write(_request(1000 * number + turn, stream, tokens))
        if stream:
            await reader.readuntil(b'"content":" token"')
            firsts.append(time.perf_counter() - began)
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise RuntimeError(head.decode())
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
            firsts.append(time.perf_counter() - began)
    writer.close()
    return firsts


async def measure_http(port: int, path: str, streams: int, rounds: int, tokens: int, pid: int) -> Row:
    process, stream = psutil.Process(pid), path == "stream"
    await asyncio.gather(*(http_client(port, number, 1, stream, tokens, 0.0) for number in range(streams)))
    before, began = process.cpu_times(), time.perf_counter()
    spread = 0.05 / streams
    results = await asyncio.gather(
        *(http_client(port, number, rounds, stream, tokens, number * spread) for number in range(streams))
    )
    wall = time.perf_counter() - began
    after = process.cpu_times()
    return _row(path, [t for one in results for t in one], streams, rounds, tokens, wall, after, before)


def _row(
    path: str, firsts: list[float], streams: int, rounds: int, tokens: int, wall: float, after: Any, before: Any
) -> Row:
    requests = streams * rounds
    cpu = (after.user - before.user) + (after.system - before.system) if after else 0.0
    firsts.sort()
    return Row(
        path=path,
        streams=streams,
        ttft_p50_ms=round(1000 * statistics.median(firsts), 2),
        ttft_p99_ms=round(1000 * firsts[int(0.99 * (len(firsts) - 1))], 2),
        cpu_us_per_token=round(1e6 * cpu / (requests * tokens), 1),
        cpu_us_per_request=round(1e6 * cpu / requests, 1),
        requests_per_s=round(requests / wall, 1),
    )


async def measure_direct(address: str, streams: int, rounds: int, tokens: int) -> Row:
    async with rpc.channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        began, spread = time.perf_counter(), 0.05 / streams
        results = await asyncio.gather(*(grpc_client(stub, n, rounds, n * spread) for n in range(streams)))
        wall = time.perf_counter() - began
    firsts = [first for one in results for first, _, _ in one]
    return _row("direct", firsts, streams, rounds, tokens, wall, None, None)


async def wait_http(port: int, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            await http_client(port, 0, 1, False, 1, 0.0)
            return
        except (OSError, RuntimeError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.1)
    raise TimeoutError(f"port {port} does not answer after {limit_s:g} s")


def start(engine: str, options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """Starts the engine and the gateway as processes of their own."""
    me = [sys.executable, "-m", "benchmarks.overhead_gateway"]
    step = ["--tokens", str(options.tokens), "--step-ms", str(options.step_ms)]
    return [
        subprocess.Popen([*me, "--engine", engine, *step]),
        subprocess.Popen([*me, "--gateway", engine, "--port", str(options.port)]),
    ]


async def compare(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        engine = f"unix:{folder}/e"
        children = start(engine, options)
        try:
            await wait_ready(engine)
            await wait_http(options.port)
            for streams in options.streams:
                rows.append(await measure_direct(engine, streams, options.rounds, options.tokens))
                for path in ("stream", "plain"):
                    rows.append(
                        await measure_http(options.port, path, streams, options.rounds, options.tokens, children[1].pid)
                    )
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait(10)
    return rows


def serve_gateway(engine: str, port: int) -> int:
    from gateway.main import run
    from gateway.settings import GatewaySettings

    return run(GatewaySettings(port=port, router=engine, log_level="warning", grace=1))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], help="numbers of concurrent clients")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each client")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--step-ms", type=float, default=5.0, help="milliseconds between tokens")
    parser.add_argument("--port", type=int, default=18765, help="port of the gateway that is measured")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        asyncio.run(serve_engine(options.engine, options.tokens, options.step_ms / 1000))
        return 0
    if options.gateway:
        return serve_gateway(options.gateway, options.port)
    rows = asyncio.run(compare(options))
    names = ("path", "clients", "TTFT p50", "p99 ms", "CPU µs/token", "µs/request", "requests/s")
    print("{:8}{:>8}{:>10}{:>9}{:>14}{:>12}{:>12}".format(*names))
    for row in rows:
        print(
            f"{row.path:8}{row.streams:8d}{row.ttft_p50_ms:10.2f}{row.ttft_p99_ms:9.2f}{row.cpu_us_per_token:14.1f}"
            f"{row.cpu_us_per_request:12.1f}{row.requests_per_s:12.1f}"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
