"""What router and gateway cost: added latency and CPU per forwarded token, against calling the engine directly.

Every number of streams is measured in one run, in turns, on the same processes: gRPC to the engine, gRPC through the
router, HTTP through a gateway on the engine, and HTTP through gateway and router (the sum). `plain` asks the latter for
whole answers instead of streams.

    python -m benchmarks.overhead --streams 1 16 64 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import overhead_lab as lab
from tandem import rpc
from tandem.inference.v1 import inference_pb2_grpc

PATHS = ("direct", "router", "gateway", "gateway+router", "plain")
# The processes whose CPU time a path is charged with.
CHARGED = {"router": ("router",), "gateway": ("gateway",), "gateway+router": ("chain", "router")}
GOLDEN = 0.6180339887
CHARGED["plain"] = CHARGED["gateway+router"]


@dataclass(frozen=True)
class Row:
    """One cell of the table. Times in milliseconds, CPU in microseconds, of the router and of the gateway."""

    path: str
    streams: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    router_us_per_token: float
    gateway_us_per_token: float
    messages_per_token: float
    requests_per_s: float

    @property
    def us_per_token(self) -> float:
        return self.router_us_per_token + self.gateway_us_per_token


Ask = Callable[[int], Awaitable[lab.Stream]]


async def client(ask: Ask, number: int, rounds: int, step_s: float) -> list[lab.Stream]:
    """One client that asks again and again. Between requests it waits up to four steps, spread evenly, so that requests
    come at all moments of a step: else a proxy's delay would only show where it makes them miss one."""
    streams = []
    for turn in range(rounds):
        await asyncio.sleep(4 * step_s * ((number * rounds + turn) * GOLDEN % 1))
        streams.append(await ask(1000 * number + turn))
    return streams


async def measure(path: str, asks: list[Ask], options: argparse.Namespace, pids: dict[str, int]) -> Row:
    """Runs one client per element of `asks`."""
    charged = CHARGED.get(path, ())
    # Warm-up: connections, and what services know of their own load.
    await asyncio.gather(*(ask(number) for number, ask in enumerate(asks)))
    rounds = max(options.rounds, -(-options.min_requests // len(asks)))
    before, began = {name: lab.cpu_seconds(pids[name]) for name in charged}, time.perf_counter()
    step_s = options.step_ms / 1000
    results = await asyncio.gather(*(client(ask, n, rounds, step_s) for n, ask in enumerate(asks)))
    wall = time.perf_counter() - began
    made = rounds * len(asks) * options.tokens
    cpu = {"router": 0.0, "gateway": 0.0}
    for name in charged:
        spent = lab.cpu_seconds(pids[name]) - before[name]
        cpu["router" if name == "router" else "gateway"] = 1e6 * spent / made
    streams = [stream for one in results for stream in one]
    firsts = sorted(first for first, _, _ in streams)
    gaps = [gap for _, between, _ in streams for gap in between]
    return Row(
        path=path,
        streams=len(asks),
        ttft_p50_ms=round(1000 * statistics.median(firsts), 2),
        ttft_p99_ms=round(1000 * firsts[int(0.99 * (len(firsts) - 1))], 2),
        gap_p50_ms=round(1000 * statistics.median(gaps), 2) if gaps else 0.0,
        router_us_per_token=round(cpu["router"], 1),
        gateway_us_per_token=round(cpu["gateway"], 1),
        messages_per_token=round(sum(count for _, _, count in streams) / made, 3),
        requests_per_s=round(len(streams) / wall, 1),
    )


async def measure_grpc(path: str, address: str, streams: int, options: argparse.Namespace, at: lab.Lab) -> Row:
    async with rpc.channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        asks: list[Ask] = [lambda number: lab.grpc_stream(stub, number, options.tokens)] * streams
        return await measure(path, asks, options, at.pids)


async def measure_http(path: str, port: int, streams: int, options: argparse.Namespace, at: lab.Lab) -> Row:
    clients = [lab.HttpClient(port) for _ in range(streams)]
    try:
        for one in clients:
            await one.open()

        def asking(one: lab.HttpClient) -> Ask:
            call = one.plain if path == "plain" else one.stream
            return lambda number: call(number, options.tokens)

        return await measure(path, [asking(one) for one in clients], options, at.pids)
    finally:
        for one in clients:
            one.close()


async def compare(options: argparse.Namespace) -> list[Row]:
    """All paths at all numbers of streams."""
    rows: list[Row] = []
    with lab.lab(options.tokens, options.step_ms, options.policy) as at:
        await lab.wait_ready(at.router)
        for port in (at.gateway_port, at.chain_port):
            await lab.wait_http(port)
        for streams in options.streams:
            for path in options.paths:
                if path in ("direct", "router"):
                    address = at.engine if path == "direct" else at.router
                    rows.append(await measure_grpc(path, address, streams, options, at))
                else:
                    port = at.gateway_port if path == "gateway" else at.chain_port
                    rows.append(await measure_http(path, port, streams, options, at))
    return rows


def table(rows: list[Row]) -> str:
    """For people. Added TTFT is against `direct` at the same number of streams."""
    names = ("path", "streams", "TTFT p50", "p99 ms", "added p50", "gap p50", "µs/token", "router", "gateway")
    head = "{:15}{:>8}{:>10}{:>9}{:>11}{:>9}{:>10}{:>8}{:>9}".format(*names)
    lines = [head + f"{'msgs/token':>12}{'requests/s':>12}"]
    direct = {row.streams: row.ttft_p50_ms for row in rows if row.path == "direct"}
    for row in rows:
        base = direct.get(row.streams)
        added = "" if base is None or row.path in ("direct", "plain") else f"{row.ttft_p50_ms - base:+.2f}"
        lines.append(
            f"{row.path:15}{row.streams:8d}{row.ttft_p50_ms:10.2f}{row.ttft_p99_ms:9.2f}{added:>11}"
            f"{row.gap_p50_ms:9.2f}{row.us_per_token:10.1f}{row.router_us_per_token:8.1f}"
            f"{row.gateway_us_per_token:9.1f}{row.messages_per_token:12.3f}{row.requests_per_s:12.1f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], help="numbers of concurrent streams")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each client")
    parser.add_argument("--min-requests", type=int, default=48, help="requests of all clients of a path, at least")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per stream")
    parser.add_argument("--step-ms", type=float, default=5.0, help="milliseconds between tokens")
    parser.add_argument("--policy", default="prefix_exact", help="routing policy")
    parser.add_argument("--paths", nargs="+", default=list(PATHS[:-1]), choices=PATHS)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    for name in ("--engine", "--router", "--engines", "--gateway"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engine:
        asyncio.run(lab.serve_engine(options.engine, options.tokens, options.step_ms / 1000))
        return 0
    if options.router:
        return lab.serve_router(options.router, options.engines, options.policy)
    if options.gateway:
        return lab.serve_gateway(options.gateway, options.port)
    rows = asyncio.run(compare(options))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
