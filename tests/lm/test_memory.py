"""KV budgets, refusals with their numbers, and memory that is reserved but not touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.lm import memory
from tandem.lm.memory import GpuMemory, cpu_kv_bytes, gpu_kv_bytes
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings

GIB = 1 << 30


def test_gpu_share_less_weights_and_activations() -> None:
    before, after = GpuMemory(79 * GIB, 80 * GIB), GpuMemory(63 * GIB, 80 * GIB)
    assert gpu_kv_bytes(0.5, before, after, 4 * GIB) == (40 - 16 - 4) * GIB


def test_two_engines_share_a_gpu() -> None:
    """What the other one holds is no part of this one's share."""
    before, after = GpuMemory(41 * GIB, 80 * GIB), GpuMemory(31 * GIB, 80 * GIB)
    assert gpu_kv_bytes(0.5, before, after, GIB) == (40 - 10 - 1) * GIB


def test_never_more_than_is_free() -> None:
    before, after = GpuMemory(80 * GIB, 80 * GIB), GpuMemory(70 * GIB, 80 * GIB)
    assert gpu_kv_bytes(1.0, before, after, GIB) == 69 * GIB


def test_nothing_left_is_refused_with_the_numbers() -> None:
    before, after = GpuMemory(80 * GIB, 80 * GIB), GpuMemory(50 * GIB, 80 * GIB)
    with pytest.raises(ValueError, match=rf"nothing is left.*{8 * GIB}.*weights take {30 * GIB}.*of a step {GIB}"):
        gpu_kv_bytes(0.1, before, after, GIB)


def test_a_share_that_others_hold_is_refused() -> None:
    before, after = GpuMemory(30 * GIB, 80 * GIB), GpuMemory(20 * GIB, 80 * GIB)
    with pytest.raises(ValueError, match=rf"is {40 * GIB}, but only {30 * GIB} bytes were free"):
        gpu_kv_bytes(0.5, before, after, GIB)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization is 0.5, but the model runs on the CPU"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5, but must be"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
        ({"gpu_memory_utilization": 0.5, "device": "cuda", "kv_cache_bytes": 1}, "set one of them"),
    ],
)
def test_refused_settings(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RunnerSettings(Path("x"), **change)


@pytest.mark.parametrize(("limit", "budget"), [(2 * GIB, GIB // 2), (4 * GIB, GIB), (64 * GIB, GIB)])
def test_default_budget_on_a_cpu(monkeypatch: pytest.MonkeyPatch, limit: int, budget: int) -> None:
    monkeypatch.setattr(memory, "memory_limit", lambda: limit)
    assert cpu_kv_bytes(RunnerSettings(Path("x"))) == budget
    assert cpu_kv_bytes(RunnerSettings(Path("x"), kv_cache_bytes=7)) == 7


def test_largest_step_is_run_and_measured(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for a GPU's allocator: the step has all its tokens, its logits and its samples."""
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda _device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 5000)
    settings = RunnerSettings(
        tiny_path,
        kernels="torch",
        threads=1,
        kv_cache_bytes=1 << 20,
        max_num_batched_tokens=90,
        max_num_seqs=20,
        max_model_len=40,
    )
    runner: Any = load_runner(settings)
    seen: list[tuple[int, int, list[int]]] = []

    def forward(batch: Any, kv: Any) -> Any:
        seen.append((batch.rows, len(batch.logit_rows), batch.context_lens.tolist()))
        return runner._forward(batch, kv)

    peak = memory.activation_peak(settings, runner.spec.max_model_len, runner._new_kv, forward, runner._sampler)
    assert peak == 4000
    assert seen == [(90, 20, [40, 40, 10])]


_TOUCH = """
import sys
from pathlib import Path
import psutil
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import SamplingParams, Sequence, Slice

def rss():
    return psutil.Process().memory_info().rss

runner = load_runner(RunnerSettings(Path(sys.argv[1]), kernels=sys.argv[2], threads=1, kv_cache_bytes=1 << 30))
spec = runner.spec
assert spec.num_blocks * spec.block_bytes > 1000 << 20

def use(blocks):
    ids = [index % 900 for index in range(len(blocks) * spec.block_size)]
    sequence = Sequence(1, 0, SamplingParams(temperature=0.0), ids, len(ids))
    runner.execute([Slice(sequence, blocks, 0, len(ids))])

use(list(range(64)))
before = rss()
use(list(range(1000, 1064)))
print(before, rss() - before, 64 * spec.block_bytes)
"""


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_kv_is_reserved_but_untouched_until_used(tiny_path: Path, kernels: str) -> None:
    """In a process of its own: a GiB of KV costs nothing, and then what is written to it."""
    if kernels == "native":
        cpu = pytest.importorskip("kernels.cpu")
        if not cpu.available():
            pytest.skip(cpu.reason())
    command = [sys.executable, "-c", _TOUCH, str(tiny_path), kernels]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    resident, grown, used = map(int, done.stdout.split())
    assert resident < 700 << 20
    assert used // 2 < grown < 2 * used + (16 << 20)
