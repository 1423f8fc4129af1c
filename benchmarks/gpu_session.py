"""Everything there is to measure on one GPU, in at most eight minutes, without a network.

    python benchmarks/gpu_session.py [--out gpu_session.json] [--budget 480] [--tune] [--dry-run]

1. The card's own rates: copy bandwidth and bf16 matmul.
2. Every kernel against fp64 references, fresh random inputs, poisoned outputs; bits alone and in a batch.
3. Bandwidth and FLOP/s of the main kernels, as shares of 1.
4. Random-weight Llama shapes of 1B and 8B: decode step eager and captured, and tokens per second at batch 1, 8, 64 and
   256, without and with speculation (four drafts, accepted with probability 0.7 each; drafting costs nothing here).

Results go to a JSON file as they come; a short table is printed last. --dry-run runs all of it with tiny shapes in
Triton's interpreter on the CPU (TRITON_INTERPRET=1): its numbers mean nothing, its code paths are the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from kernels.report import measure_cuda, render
from kernels.triton.attention import AttentionBatch
from kernels.triton.checks import run_benchmarks, run_checks
from kernels.triton.configs import current_target
from kernels.triton.sampling import RowParams, sample
from tandem.lm.config import ModelConfig
from tandem.lm.decode_graphs import DecodeGraphs, StepInputs, capture_cuda
from tandem.lm.models.triton_model import TritonKV, TritonModel

DRAFTS, ACCEPTANCE = 4, 0.7


@dataclass(frozen=True)
class Plan:
    """What a session runs: real shapes, or tiny ones for a dry run."""

    device: torch.device
    dry: bool
    models: dict[str, ModelConfig]
    batches: tuple[int, ...]
    context: int
    steps: int

    def measure(self, call: Callable[[], object]) -> float:
        """Median milliseconds of a call."""
        if not self.dry:
            return measure_cuda(call)
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)


def shape(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, inter: int, vocab: int) -> ModelConfig:
    """A Llama-shaped model."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        intermediate_size=inter,
        max_position=8192,
        norm_eps=1e-5,
        tied_embeddings=True,
        torch_dtype="bfloat16",
    )


def plan_of(dry: bool) -> Plan:
    if dry:
        tiny = shape(32, 1, 2, 1, 16, 32, 64)
        return Plan(torch.device("cpu"), True, {"tiny": tiny}, (1, 2), 20, 2)
    models = {
        "1B": shape(2048, 16, 32, 8, 64, 8192, 128256),
        "8B": shape(4096, 32, 32, 8, 128, 14336, 128256),
    }
    return Plan(torch.device("cuda"), False, models, (1, 8, 64, 256), 1024, 32)


class RandomSource:
    """A WeightSource of random weights, drawn on the device: what they are does not matter for speed."""

    stored_bytes = 0

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config, self._device = config, device

    def has(self, name: str) -> bool:
        return not name.endswith(".bias") and not name.startswith(("head", "rope_freqs"))

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        config, kind = self.config, name.split(".")[-2]
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inter = config.hidden_size, config.intermediate_size
        shapes = {
            "embed": (config.vocab_size, hidden),
            "q": (q, hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, q),
            "gate": (inter, hidden),
            "up": (inter, hidden),
            "down": (hidden, inter),
        }
        if kind not in shapes:
            return torch.ones(hidden, dtype=dtype, device=self._device)
        return torch.empty(shapes[kind], dtype=dtype, device=self._device).normal_(std=0.02)

    def raw(self, name: str) -> None:
        return None

    def digest(self) -> str:
        return "random"

    def close(self) -> None:
        pass


def card(plan: Plan) -> dict[str, Any]:
    """The card, its software, and its own copy bandwidth (GB/s, read + write) and matmul rate (TFLOP/s)."""
    import triton

    size = 1 << (10 if plan.dry else 29)
    source = torch.zeros(size, dtype=torch.bfloat16, device=plan.device)
    target = torch.empty_like(source)
    copy = plan.measure(lambda: target.copy_(source))
    width = 64 if plan.dry else 8192
    a = torch.randn(width, width, device=plan.device).bfloat16()
    matmul = plan.measure(lambda: a @ a)
    return {
        "device": "dry run" if plan.dry else torch.cuda.get_device_name(),
        "target": current_target(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "copy_gb_s": 2 * source.nbytes / copy / 1e6,
        "matmul_tflop_s": 2 * width**3 / matmul / 1e9,
    }


def step_of(plan: Plan, model: TritonModel, batch: int, rows: int, context: int) -> tuple[StepInputs, TritonKV]:
    """`rows` query rows for each of `batch` sequences with `context` tokens each, and a cache that holds them."""
    block = 16
    per = -(-(context + plan.steps * (DRAFTS + 1) + rows) // block)
    kv = model.new_kv(batch * per, block, model.default_kv_dtype, batch * rows)
    for tensor in (*kv.keys, *kv.values):
        tensor.zero_()
    device = plan.device
    tables = torch.randperm(batch * per, device=device).view(batch, per).int()
    positions = (context - rows + torch.arange(rows, device=device)).repeat(batch)
    owners = torch.arange(batch, device=device).repeat_interleave(rows)
    slots = tables[owners, positions // block].long() * block + positions % block
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device)
    attention = AttentionBatch(starts, lengths, tables, rows, context)
    tokens = torch.randint(0, model.config.vocab_size, (batch * rows,), device=device)
    return StepInputs(tokens, positions.int(), slots, attention, torch.arange(batch * rows, device=device)), kv


def params_of(rows: int, device: torch.device) -> RowParams:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    return RowParams(
        column(1.0, torch.float32),
        column(0.0, torch.float32),
        column(0, torch.int32),
        column(1.0, torch.float32),
        torch.arange(rows, device=device),
        *(column(0, torch.int32) for _ in range(3)),
    )


def run_batch(plan: Plan, model: TritonModel, batch: int, drafts: int) -> dict[str, Any]:
    """Decode step eager and captured, and tokens per second of steps with sampling, at one batch size."""
    rows = 1 + drafts
    step, kv = step_of(plan, model, batch, rows, plan.context)
    capture = (lambda call: call) if plan.dry else capture_cuda
    model.graphs = DecodeGraphs(model.step_logits, capture, plan.context, patience=1)
    result: dict[str, Any] = {"batch": batch, "drafts": drafts, "context": plan.context}
    result["eager_ms"] = plan.measure(lambda: model.step_logits(step, kv))
    captured = model.graphs.run(step, kv)
    if captured is None:
        result["captured_ms"] = None
        result["note"] = f"{batch * rows} rows exceed the largest captured step"
    else:
        exact = bool(torch.equal(captured, model.step_logits(step, kv)))
        result["captured_equals_eager"] = exact
        result["captured_ms"] = plan.measure(lambda: model.graphs.run(step, kv) if model.graphs else None)
    params = params_of(batch * rows, plan.device)
    chance = random.Random(batch * 10 + drafts)
    tokens = 0
    if not plan.dry:
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(plan.steps):
        logits = model.graphs.run(step, kv) if captured is not None else model.step_logits(step, kv)
        ids = sample(logits if logits is not None else model.step_logits(step, kv), params)
        # The tokens come to the host in every step, as they do when a request streams.
        step.token_ids.copy_(ids.clamp_min(0).cpu().to(plan.device))
        for _sequence in range(batch):
            kept = 0
            while kept < drafts and chance.random() < ACCEPTANCE:
                kept += 1
            tokens += 1 + kept
    seconds = time.perf_counter() - started
    result["tokens_per_second"] = tokens / seconds
    result["tokens_per_step"] = tokens / plan.steps / batch
    return result


def run_model(plan: Plan, name: str, config: ModelConfig, left: Callable[[], float]) -> list[dict[str, Any]]:
    """All batch sizes of one model; what no time is left for is said to be left out."""
    source: Any = RandomSource(config, plan.device)
    model = TritonModel(source, torch.bfloat16, plan.device, plan.context + 1024)
    found = []
    for batch in plan.batches:
        for drafts in (0, DRAFTS):
            if left() < 20:
                found.append({"model": name, "batch": batch, "drafts": drafts, "note": "left out: no time"})
                continue
            try:
                with torch.inference_mode():
                    found.append({"model": name} | run_batch(plan, model, batch, drafts))
            except torch.OutOfMemoryError as error:
                found.append({"model": name, "batch": batch, "drafts": drafts, "note": f"out of memory: {error}"[:200]})
    return found


def summary(results: dict[str, Any]) -> str:
    """The short table that is printed last."""
    lines = []
    card_ = results.get("card", {})
    if "copy_gb_s" in card_:
        lines.append(
            f"{card_['device']} ({card_['target']}): copy {card_['copy_gb_s']:.0f} GB/s, "
            f"matmul {card_['matmul_tflop_s']:.0f} TFLOP/s; torch {card_['torch']}, triton {card_['triton']}"
        )
    wrong = [check for check in results.get("checks", []) if not check["passed"]]
    lines.append(f"checks: {len(results.get('checks', []))} run, {len(wrong)} wrong")
    lines += [f"  WRONG {check['operation']} {check['dtype']}: {check['error']} {check['note']}" for check in wrong]
    for speed in results.get("speeds", []):
        lines.append(
            f"{speed['operation']:13} {speed['shape']:32} {speed['milliseconds']:9.4f} ms  "
            f"{speed['share_of_copy']:5.0%} of copy  {speed['share_of_matmul']:5.0%} of matmul"
        )
    for run in results.get("models", []):
        head = f"{run['model']:5} batch {run['batch']:3} drafts {run['drafts']}"
        if "tokens_per_second" not in run:
            lines.append(f"{head}  {run['note']}")
            continue
        captured = "–" if run["captured_ms"] is None else f"{run['captured_ms']:.2f}"
        lines.append(
            f"{head}  eager {run['eager_ms']:.2f} ms, captured {captured} ms, {run['tokens_per_second']:.0f} tok/s"
        )
    lines += [f"FAILED {section}: {error.splitlines()[-1]}" for section, error in results.get("errors", {}).items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the session. Returns 1 if a check is wrong or a section failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_session.json"))
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for everything")
    parser.add_argument("--tune", action="store_true", help="first look for better tiles and keep them in the cache")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("no GPU here; TRITON_INTERPRET=1 with --dry-run tries the code on the CPU", file=sys.stderr)
        return 2
    started = time.monotonic()
    plan = plan_of(options.dry_run)
    results: dict[str, Any] = {"dry_run": plan.dry, "errors": {}, "models": []}

    def left() -> float:
        return options.budget - (time.monotonic() - started)

    def section(name: str, work: Callable[[], Any]) -> Any:
        print(f"[{time.monotonic() - started:5.0f} s] {name}", flush=True)
        try:
            return work()
        except Exception:
            results["errors"][name] = traceback.format_exc()
            return None
        finally:
            options.out.write_text(json.dumps(results, indent=1, default=str))

    results["card"] = section("card", lambda: card(plan)) or {}
    checks = section("checks", lambda: run_checks(plan.device, small=plan.dry)) or []
    results["checks"] = [dataclasses.asdict(check) | {"passed": check.passed} for check in checks]
    speeds = (
        section("speeds", lambda: run_benchmarks(plan.device, plan.measure, scale=0.001 if plan.dry else 1.0)) or []
    )
    copy, matmul = results["card"].get("copy_gb_s", 1.0), results["card"].get("matmul_tflop_s", 1.0)
    results["speeds"] = [
        dataclasses.asdict(speed)
        | {"share_of_copy": speed.gigabytes_per_second / copy, "share_of_matmul": speed.gigaflops / 1e3 / matmul}
        for speed in speeds
    ]
    for name, config in plan.models.items():
        results["models"] += section(f"model {name}", lambda n=name, c=config: run_model(plan, n, c, left)) or []
    results["seconds"] = time.monotonic() - started
    options.out.write_text(json.dumps(results, indent=1, default=str))
    print(render(checks))
    print()
    print(summary(results))
    bad = [check for check in checks if not check.passed]
    unequal = [run for run in results["models"] if run.get("captured_equals_eager") is False]
    return 1 if bad or unequal or results["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
