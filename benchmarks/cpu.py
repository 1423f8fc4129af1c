"""Tandem against its peers on this machine's CPUs, all served over HTTP, in turns, in one run.

    python -m benchmarks.cpu                       all workloads, three rounds, every peer that is installed
    python -m benchmarks.cpu --workloads w1 w4 --rounds 1 --scale 0.2
    python -m benchmarks.cpu --write               also writes docs/performance.md and its plot

W1: one stream, 128 + 128 tokens. W2: 64 requests at concurrency 32, 128 + 64. W2s: the same at temperature 0.8, top_p
0.95, seeded, logprobs 5 on a quarter. W3: a shared prefix of 1,024 tokens, concurrency 8; the warm half is reported.
W4: one prompt of 4,096 tokens. Greedy but for W2s, stop tokens ignored, no speculation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cpubench import report, roofline, servers
from benchmarks.cpubench.workloads import Client, Prompts, Result, run
from tandem.models.store import resolve
from tandem.tokenizer import Tokenizer, load_bundle

WORKLOADS = ("w1", "w2", "w2s", "w3", "w4")
Runs = dict[str, dict[str, dict[str, list[float]]]]


def machine(threads: int) -> dict[str, Any]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {"cpu": name, "cores": threads, "system": platform.system(), "python": platform.python_version()}


def _keep(runs: Runs, server: str, result: Result) -> None:
    cell = runs.setdefault(server, {}).setdefault(result.workload, {})
    for key, value in result.values.items():
        cell.setdefault(key, []).append(value)
    for error in result.errors[:2]:
        print(f"    {server} {result.workload}: {error}", flush=True)


def one_turn(server: servers.Server, port: int, options: argparse.Namespace, tokenizer: Tokenizer, runs: Runs) -> None:
    """Runs every workload on one server once; it is started for them and stopped afterwards."""
    prompts = Prompts(tokenizer, f"{time.time_ns()}")
    for command, workloads in server.starts(options.workloads):
        with (
            tempfile.TemporaryDirectory() as folder,
            servers.started(server, command, port, Path(folder) / "log") as running,
        ):
            client = Client(running.url, server.model or _model(running.url), server.extra)
            asyncio.run(client.many([prompts.text(64, "warm")], 8, 1))
            stack = {"ready_s": running.ready_s, "rest_pss_mib": running.pss_mib()}
            for workload in workloads:
                result = asyncio.run(run(workload, client, prompts, options.scale))
                _keep(runs, server.name, result)
                shown = ", ".join(f"{key} {value:.1f}" for key, value in result.values.items())
                print(f"  {server.name:18} {workload:4} {shown}", flush=True)
                if workload == "w2":
                    stack["loaded_pss_mib"] = running.pss_mib()
            _keep(runs, server.name, Result("stack", stack))


def _model(url: str) -> str:
    import httpx

    return str(httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"])


def medians(runs: Runs) -> dict[str, dict[str, dict[str, float]]]:
    return {
        server: {
            workload: {key: statistics.median(values) for key, values in cell.items()}
            for workload, cell in cells.items()
        }
        for server, cells in runs.items()
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or .gguf file")
    parser.add_argument("--llama-gguf", type=Path, action="append", default=[], help="more files for llama-server")
    parser.add_argument("--hf-dir", type=Path, help="the same model as a safetensors folder, for vLLM")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1e9, help="no turn begins after this time")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each workload's requests")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path, help="writes all numbers here")
    parser.add_argument("--write", action="store_true", help="writes docs/performance.md and docs/performance.svg")
    options = parser.parse_args(argv)
    path = resolve(options.model).path
    tokenizer = Tokenizer(load_bundle(path))
    port = servers.free_port()
    tested = [servers.tandem(options.model, "none", port)]
    if not options.no_peers:
        tested += servers.peers(path, options.llama_gguf, options.hf_dir, port, options.threads)
    limits = roofline.measure(options.threads)
    print(report.roofline_line(limits, path.stat().st_size), flush=True)
    runs: Runs = {}
    begun = time.monotonic()
    for turn in range(options.rounds):
        print(f"round {turn + 1} of {options.rounds}", flush=True)
        for server in tested:
            if time.monotonic() - begun > 60 * options.minutes:
                print(f"  {server.name}: no time left for this turn", flush=True)
                continue
            one_turn(server, port, options, tokenizer, runs)
    found = {"machine": machine(options.threads), "limits": asdict(limits), "medians": medians(runs), "runs": runs}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    text = report.markdown(found, path.stat().st_size, options)
    print(text)
    if options.write:
        report.write(Path(__file__).parent.parent / "docs", text, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
