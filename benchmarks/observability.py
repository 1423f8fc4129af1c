"""What traces and metrics cost: W2's load on whole stacks that differ in nothing else, in interleaved rounds.

Three stacks run side by side and take turns under load, in an order that is drawn anew for each round:

    off      as `tandem serve` starts: no traces, no metrics listeners (the gateway's own counters cannot be turned off)
    off2     the same once more: how far two equal stacks seem to differ is what cannot be measured here
    on       every request traced by every service and exported to a sink on this machine, which shares its cores; all
             metrics listeners on, and each scraped every 5 s

A round gives one ratio of throughputs; the table shows their median with a 95% bootstrap interval.

    python -m benchmarks.observability --budget 165
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import psutil

from benchmarks.cpubench import servers
from benchmarks.cpubench.workloads import Client, Prompts
from tandem.models.store import resolve
from tandem.tokenizer import Tokenizer, load_bundle

ARMS = ("off", "off2", "on")
PAIRS = (("off2", "off"), ("on", "off"), ("on", "off2"))
SCRAPE_S = 5.0
SERVICES = ("gateway", "router", "engine", "draft")


@dataclass
class Arm:
    """One running stack, and what its rounds gave."""

    name: str
    url: str
    process: psutil.Process
    metrics_port: int = 0
    tok_s: list[float] = field(default_factory=list)
    # CPU milliseconds per request, by service.
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far, by service."""
        total = dict.fromkeys(SERVICES, 0.0)
        for child in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                name = next((name for name in SERVICES if name in words), None)
                if name:
                    times = child.cpu_times()
                    total[name] += times.user + times.system
        return total


def sink(port: int) -> None:
    """Takes OTLP over gRPC and throws it away unread."""

    def export(request: bytes, context: grpc.ServicerContext) -> bytes:
        return b""

    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(4))
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


@contextlib.contextmanager
def running_sink() -> Iterator[str]:
    port = servers.free_port()
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.observability", "--sink", str(port)])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def stack(name: str, options: argparse.Namespace, endpoint: str, folder: Path) -> Iterator[Arm]:
    """A started stack."""
    port, metrics_port, flags = servers.free_port(), 0, []
    server = servers.tandem(options.model, options.draft, port, name)
    if name == "on":
        # Router, engine and draft take this and the next ones.
        metrics_port = servers.free_port()
        flags = ["--otlp-endpoint", endpoint, "--metrics-port", str(metrics_port)]
    with servers.started(server, [*server.command, *flags], port, folder / f"{name}.log") as running:
        yield Arm(name, running.url, running.process, metrics_port)


def scrape(arm: Arm, draft: str) -> list[str]:
    """All expositions of a stack."""
    ports = range(arm.metrics_port, arm.metrics_port + (2 if draft == "none" else 3))
    return [
        httpx.get(url, timeout=10).text
        for url in (f"{arm.url}/metrics", *(f"http://127.0.0.1:{p}/metrics" for p in ports))
    ]


@contextlib.contextmanager
def scraped(arm: Arm, draft: str) -> Iterator[None]:
    """Scrapes as Prometheus would."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(SCRAPE_S):
            scrape(arm, draft)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def one_round(arm: Arm, options: argparse.Namespace, texts: list[str]) -> None:
    """Puts one load on one stack. Raises RuntimeError if a request fails."""
    client, before = Client(arm.url, "", {"ignore_eos": True}), arm.cpu()
    answers, wall = asyncio.run(client.many(list(texts), options.tokens, options.concurrency))
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        raise RuntimeError(f"{arm.name}: {errors[0]}")
    arm.tok_s.append(sum(answer.tokens for answer in answers) / wall)
    for name, seconds in arm.cpu().items():
        arm.cpu_ms.setdefault(name, []).append((seconds - before[name]) / len(texts) * 1e3)


def interval(values: list[float], rng: random.Random, draws: int = 4000) -> tuple[float, float, float]:
    """Median, and the 2.5% and 97.5% quantiles of bootstrapped medians."""
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return statistics.median(values), medians[int(draws * 0.025)], medians[int(draws * 0.975)]


def table(arms: dict[str, Arm], exported: float, dropped: float) -> dict[str, object]:
    """Prints the result and returns it."""
    rng = random.Random(1)
    rounds = min(len(arm.tok_s) for arm in arms.values())
    found: dict[str, object] = {"rounds": rounds, "spans_exported": exported, "spans_dropped": dropped}
    for name, arm in arms.items():
        cpu = {service: statistics.median(values) for service, values in arm.cpu_ms.items() if any(values)}
        found[name] = {"tok_s": statistics.median(arm.tok_s), "cpu_ms_per_request": cpu}
        shown = ", ".join(f"{service} {value:.2f}" for service, value in cpu.items())
        print(f"{name:5} {statistics.median(arm.tok_s):7.1f} tok/s   CPU ms per request: {shown}")
    for upper, lower in PAIRS:
        ratios = [a / b for a, b in zip(arms[upper].tok_s[:rounds], arms[lower].tok_s[:rounds], strict=True)]
        middle, low, high = interval(ratios, rng)
        found[f"{upper}/{lower}"] = {"median": middle, "low": low, "high": high}
        print(f"{upper}/{lower}: {100 * (middle - 1):+.2f}% [{100 * (low - 1):+.2f}%, {100 * (high - 1):+.2f}%]")
    print(f"{rounds} rounds; {exported:.0f} spans of the gateway exported, {dropped:.0f} dropped")
    return found


def spans(text: str) -> tuple[float, float]:
    """Exported and dropped, of one exposition."""
    exported = sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith("tandem_trace_spans_exported_total")
    )
    dropped = sum(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith("tandem_trace_spans_dropped_total")
    )
    return exported, dropped


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Starts everything and runs rounds until the time is over."""
    end = time.monotonic() + options.budget
    tokenizer = Tokenizer(load_bundle(resolve(options.model).path))
    rng, salt = random.Random(time.time_ns()), str(time.time_ns())
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        endpoint = running.enter_context(running_sink())
        arms = {name: running.enter_context(stack(name, options, endpoint, folder)) for name in ARMS}
        running.enter_context(scraped(arms["on"], options.draft))
        prompts, longest = Prompts(tokenizer, salt), 0.0
        for number in range(-1, options.rounds):
            began = time.monotonic()
            if number > 0 and began + 1.15 * longest > end:
                break
            # The first round only warms up.
            count = options.requests if number >= 0 else min(8, options.requests)
            texts = [prompts.text(options.prompt, f"{number}/{index}") for index in range(count)]
            for name in rng.sample(ARMS, len(ARMS)):
                one_round(arms[name], options, texts)
            if number >= 0:
                longest = max(longest, time.monotonic() - began)
            else:
                for arm in arms.values():
                    arm.tok_s.clear()
                    arm.cpu_ms.clear()
        time.sleep(1.5)
        return table(arms, *spans(scrape(arms["on"], options.draft)[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--draft", default="none", help="as of tandem serve; at 32 streams no drafts are sought anyway")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=32, help="per round and stack")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per request")
    parser.add_argument("--rounds", type=int, default=100, help="at most")
    parser.add_argument("--budget", type=float, default=165.0, help="seconds, start-up included")
    parser.add_argument("--json", type=Path, help="also write the result there")
    parser.add_argument("--sink", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sink:
        sink(options.sink)
        return
    found = measure(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
