"""Compares routing policies by simulation: the router's own policy and index code against simulated engines.

    python -m benchmarks.router_sim                                     # small and quick
    python -m benchmarks.router_sim --engines 64 --requests 12000 --traces conversation toolagent burst
    python -m benchmarks.router_sim --engines 64 --routers 4 --plots out/
    python -m benchmarks.router_sim --file conversation_trace.jsonl --engines 16 --speed 2
    python -m benchmarks.router_sim --generate toolagent --requests 1000 --out trace.jsonl

A file is a Mooncake trace or a router's flight recording (--recorder-file).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.simulation import plots, traces
from benchmarks.simulation.engine import MODELS, ServiceModel
from benchmarks.simulation.traces import Trace
from benchmarks.simulation.world import SimConfig, SimResult, World
from router.settings import POLICIES

# Requests per second and engine at which the fleet is busy but the best policies still serve everyone.
DEFAULT_RATES = {
    "gpu-8b": {"conversation": 1.9, "toolagent": 3.6, "burst": 24.0},
    "cpu-135m": {"conversation": 0.09, "toolagent": 0.17, "burst": 1.3},
}


def simulate(trace: Trace, model: ServiceModel, config: SimConfig) -> SimResult:
    return World(trace, model, config).run()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="python -m benchmarks.router_sim",
    )
    parser.add_argument("--engines", type=int, default=8, help="simulated engines, 1 to 1,024")
    parser.add_argument("--routers", type=int, default=1, help="routers side by side, 1 to 8")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--traces", nargs="+", default=["conversation"], choices=list(traces.SHAPES))
    parser.add_argument("--requests", type=int, default=400, help="requests per trace")
    parser.add_argument("--rate", type=float, help="requests per second and engine; default: by trace and model")
    parser.add_argument("--model", default="gpu-8b", choices=list(MODELS), help="service-time model of the engines")
    parser.add_argument("--prefill-rate", type=float, help="override: prompt tokens per second")
    parser.add_argument("--step-ms", type=float, help="override: base of a step")
    parser.add_argument("--step-per-sequence-ms", type=float, help="override: what each sequence adds to a step")
    parser.add_argument("--kv-tokens", type=int, help="override: KV capacity of an engine")
    parser.add_argument("--slow-engines", type=int, default=0, help="this many engines are ten times slower")
    parser.add_argument("--timeout-s", type=float, default=30.0, help="a first token later than this is not served")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes that simulate at once")
    parser.add_argument("--file", type=Path, help="replay this trace or flight recording instead")
    parser.add_argument("--block-tokens", type=int, default=traces.MOONCAKE_BLOCK_TOKENS, help="tokens per hash id")
    parser.add_argument("--speed", type=float, default=1.0, help="replay a file this many times faster")
    parser.add_argument("--plots", type=Path, help="write SVG plots into this folder")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--generate", choices=list(traces.SHAPES), help="only write a trace, to --out")
    parser.add_argument("--out", type=Path, default=Path("trace.jsonl"))
    options = parser.parse_args(arguments)
    for name, low, high in (("engines", 1, 1024), ("routers", 1, 8), ("requests", 1, 10_000_000), ("jobs", 1, 256)):
        if not low <= getattr(options, name) <= high:
            parser.error(f"--{name} is {getattr(options, name)}, but must be {low} to {high}")
    return options


def model_of(options: argparse.Namespace) -> ServiceModel:
    """The named model with its overrides."""
    model = MODELS[options.model]
    if options.prefill_rate:
        model = replace(model, prefill_rate=options.prefill_rate)
    if options.step_ms:
        model = replace(model, step_s=options.step_ms / 1000)
    if options.step_per_sequence_ms:
        model = replace(model, step_per_sequence_s=options.step_per_sequence_ms / 1000)
    if options.kv_tokens:
        model = replace(model, kv_tokens=options.kv_tokens)
    return model


def load_traces(options: argparse.Namespace) -> list[Trace]:
    if options.file:
        trace = traces.read(options.file, options.block_tokens, options.requests if options.requests != 400 else 0)
        faster = [replace(request, at_s=request.at_s / options.speed) for request in trace.requests]
        return [replace(trace, requests=faster)]
    result = []
    for name in options.traces:
        rate = options.rate or DEFAULT_RATES[options.model][name]
        result.append(traces.generate(name, options.requests, rate * options.engines, options.seed))
    return result


def table(results: list[SimResult]) -> str:
    lines = [f"{'policy':16}{'hit rate':>9}{'TTFT p50':>10}{'TTFT p99':>10}{'served':>9}{'CoV':>7}{'pred. error':>13}"]
    for r in results:
        lines.append(
            f"{r.policy:16}{r.hit_rate:9.1%}{r.ttft_p50_s:9.3f}s{r.ttft_p99_s:9.3f}s{r.served:9.2%}"
            f"{r.imbalance_cov:7.3f}{r.prediction_error:13.2%}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.generate:
        rate = (options.rate or DEFAULT_RATES[options.model][options.generate]) * options.engines
        trace = traces.generate(options.generate, options.requests, rate, options.seed)
        traces.write(options.out, trace.requests)
        print(f"{options.out}: {trace.summary()}")
        return 0
    model = model_of(options)
    everything: list[SimResult] = []
    for trace in load_traces(options):
        began = time.monotonic()
        configs = [
            SimConfig(
                policy,
                engines=options.engines,
                routers=options.routers,
                seed=options.seed,
                timeout_s=options.timeout_s,
                slow_engines=options.slow_engines,
            )
            for policy in options.policies
        ]
        print(f"{trace.summary()}; {options.engines} engines ({model.name}), {options.routers} router(s)")
        if options.jobs > 1:
            with ProcessPoolExecutor(options.jobs) as pool:
                results = list(pool.map(simulate, [trace] * len(configs), [model] * len(configs), configs))
        else:
            results = [simulate(trace, model, config) for config in configs]
        print(table(results))
        print(f"({time.monotonic() - began:.1f} s)\n", flush=True)
        if options.plots:
            for path in plots.write_all(options.plots, results):
                print(path)
        everything += results
    if options.json:
        rows = [{key: value for key, value in asdict(result).items() if key != "ttfts"} for result in everything]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
