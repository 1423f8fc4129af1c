"""What `tandem serve` tells once everything is ready: one table, one curl."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from tandem import __version__, rpc
from tandem.inference.v1 import inference_pb2, inference_pb2_grpc
from tandem.launcher.child import Child
from tandem.launcher.plan import Plan


async def served_model(address: str) -> inference_pb2.ModelInfo | None:
    """What an engine says it serves; None if it does not say so within a few seconds."""
    channel = rpc.channel(address)
    try:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=5.0)
        return answer.model
    except grpc.aio.AioRpcError:
        return None
    finally:
        await channel.close()


def resident_bytes(pid: int) -> int:
    """Resident set of a process and its children; 0 if it is gone."""
    try:
        process = psutil.Process(pid)
        return sum(int(each.memory_info().rss) for each in (process, *process.children(recursive=True)))
    except psutil.Error:
        return 0


def curl(url: str, model: str) -> str:
    messages = [{"role": "user", "content": "Say hello."}]
    # A small model may ramble on to the end of its context.
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 100, "stream": True})
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"


def table(plan: Plan, children: Sequence[Child]) -> Table:
    """One row per process."""
    result = Table(title=f"Tandem {__version__} is ready", title_justify="left")
    for column in ("service", "address", "pid", "threads", "memory", "ready after"):
        result.add_column(column, justify="right" if column in ("pid", "threads", "memory", "ready after") else "left")
    for child in children:
        threads = str(plan.threads) if child.spec.service == "engine" else ""
        memory = f"{resident_bytes(child.pid) / 1e6:,.0f} MB"
        after = "" if child.ready_after_s is None else f"{child.ready_after_s:.1f} s"
        result.add_row(child.spec.name, child.spec.address, str(child.pid), threads, memory, after)
    return result


async def print_report(plan: Plan, children: Sequence[Child], console: Console) -> None:
    """Prints the table, the model with its numerics id, and a curl that can be pasted."""
    engine = next(child for child in children if child.spec.service == "engine")
    model = await served_model(engine.spec.address)
    console.print(table(plan, children))
    name = "default"
    if model is not None:
        name = model.name
        kind = "batch-invariant" if model.batch_invariant else "best effort"
        console.print(f"model     {model.name}  ({model.architecture}, context {model.max_model_len:,} tokens)")
        console.print(f"numerics  {model.numerics_id}  ({kind})", highlight=False)
    console.print(f"API       {plan.url}/v1", highlight=False)
    # Plain print: a terminal may wrap it, but what is copied stays one line.
    print(f"\n{curl(plan.url, name)}\n\nCtrl-C stops everything.", file=console.file, flush=True)
