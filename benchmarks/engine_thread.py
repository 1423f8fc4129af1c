"""Whether the gRPC server, a thread in the engine's process, steals time from the step.

In one engine process, in turns: `alone`, the step loop decodes for requests that nobody reads; `served`, for as many
gRPC streams to a client in a process of its own. Both decode the same prompts to the same length. Compared are steps
that decode for all streams at once: the time in the runner, and the time from one step's start to the next one's, which
has the loop's own work and every wait for the interpreter lock in it. Also told: CPU time of the server's thread.

    python -m benchmarks.engine_thread --streams 32 --threads 1 2
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_service.engine import Engine
from engine_service.jobs import Job
from engine_service.main import SWITCH_INTERVAL_S
from engine_service.process import Process
from engine_service.requests import Choice, Request
from engine_service.settings import EngineSettings
from engine_service.text import StopRules, StopTracker
from tandem import rpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.lm.types import SamplingParams, Sequence, Slice, SliceOutput

_FIRST_ID = 1_000_000


@dataclass
class Steps:
    """Full decode steps of one mode: ms in the runner, ms from start to start, and CPU of the server's thread."""

    runner: list[float] = field(default_factory=list)
    period: list[float] = field(default_factory=list)
    server_cpu_s: float = 0.0
    wall_s: float = 0.0


class Recorder:
    """Wraps a runner's execute and keeps the times of steps in which all streams decode."""

    def __init__(self, runner: Any, streams: int) -> None:
        self._execute, self._streams = runner.execute, streams
        self.steps = Steps()
        self._last: float | None = None
        runner.execute = self.execute

    def execute(self, slices: list[Slice]) -> list[SliceOutput]:
        start = time.perf_counter()
        outputs = self._execute(slices)
        full = len(slices) == self._streams and all(piece.count == 1 for piece in slices)
        if full:
            self.steps.runner.append((time.perf_counter() - start) * 1000)
            if self._last is not None:
                self.steps.period.append((start - self._last) * 1000)
        self._last = start if full else None
        return outputs


def prompt(number: int, round_: int) -> list[int]:
    """16 ids that no other stream or round has, so that nothing is cached."""
    return [100 + number, 200 + round_, *range(1000 + 37 * number, 1014 + 37 * number)]


async def alone(engine: Engine, streams: int, tokens: int, round_: int) -> None:
    """Decodes for requests that nobody reads."""
    params = SamplingParams(temperature=0.0)
    requests = []
    for number in range(streams):
        ids = prompt(number, round_)
        request = Request(_FIRST_ID * (round_ + 1) + number, "", params, ids, time.monotonic())
        sequence = Sequence(request.id, 0, params, list(ids), len(ids))
        choice = Choice(request, sequence, tokens)
        request.choices.append(choice)
        rules = StopRules()
        engine.loop.submit(Job(request, {0: StopTracker(choice, rules, engine.tokenizer)}))
        requests.append(request)
    while any(request.unfinished for request in requests):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def served(address: str, streams: int, tokens: int, round_: int) -> None:
    """The same for a client in another process."""
    command = [sys.executable, "-m", "benchmarks.engine_thread", "--client", address]
    command += ["--streams", str(streams), "--tokens", str(tokens), "--round", str(round_)]
    process = await asyncio.create_subprocess_exec(*command)
    if await process.wait():
        raise SystemExit("the client failed")


async def client(address: str, streams: int, tokens: int, round_: int) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(rpc.channel(address))

    async def one(number: int) -> None:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt(number, round_)),
            sampling=pb.SamplingParams(temperature=0.0),
            stop=pb.StopConditions(max_tokens=tokens, ignore_eos=True),
        )
        count = 0
        async for response in stub.Generate(request):
            count += sum(len(event.delta.ids) for event in response.events)
        if count != tokens:
            raise SystemExit(f"stream {number} got {count} tokens of {tokens}")

    await asyncio.gather(*(one(number) for number in range(streams)))


async def measure(threads: int, streams: int, tokens: int, rounds: int) -> dict[str, Steps]:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    results = {"alone": Steps(), "served": Steps()}
    with tempfile.TemporaryDirectory(prefix="tdm", dir="/tmp") as folder:
        listen = f"unix:{Path(folder) / 'e'}"
        values = {"threads": threads, "kv_cache_bytes": 256 << 20, "max_num_seqs": streams, "prefix_caching": False}
        settings = EngineSettings.model_validate({"listen": listen, **values})
        process = Process(settings)
        await process.start()
        engine = await process.load()
        recorder = Recorder(engine.runner, streams)
        await alone(engine, streams, 8, 10_000)
        for round_ in range(rounds):
            for name in ("alone", "served"):
                recorder.steps = results[name]
                cpu, wall = time.thread_time(), time.monotonic()
                if name == "alone":
                    await alone(engine, streams, tokens, 2 * round_)
                else:
                    await served(listen, streams, tokens, 2 * round_ + 1)
                results[name].server_cpu_s += time.thread_time() - cpu
                results[name].wall_s += time.monotonic() - wall
        await process.stop()
    return results


def report(threads: int, results: dict[str, Steps], tokens: int) -> None:
    for name, steps in results.items():
        runner, period = statistics.median(steps.runner), statistics.median(steps.period)
        slow = statistics.quantiles(steps.period, n=10)[-1]
        cpu = steps.server_cpu_s * 1e6 / tokens
        print(
            f"| {threads} | {name} | {runner:.2f} | {period:.2f} | {slow:.2f} | {period - runner:.2f} | {cpu:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per stream")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="compute threads")
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        asyncio.run(client(options.client, options.streams, options.tokens, options.round))
        return
    print(f"{options.streams} streams, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n")
    print(
        "| threads | | step in the runner, ms | start to start, ms | its p90 | outside the runner | server µs/token |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for threads in options.threads:
        results = asyncio.run(measure(threads, options.streams, options.tokens, options.rounds))
        report(threads, results, options.streams * options.tokens * options.rounds)


if __name__ == "__main__":
    main()
