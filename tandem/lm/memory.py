"""Where the bytes of a process go: the KV budget on each device, the working memory of a step, and the plan of all."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

from tandem.lm.batch import KV, StepBatch, build_batch
from tandem.lm.processors import Row
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import SamplingParams, Sequence, Slice
from tandem.machine import memory_limit

_GIB = 1 << 30
DEFAULT_UTILIZATION = 0.9


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device that computes. They are a ceiling: weights and KV cost memory once they are touched."""

    weights: int
    kv: int
    # Activations and logits of the largest step: an estimate on CPUs, measured on GPUs.
    workspace: int
    # Interpreter, libraries, tokenizer: what was resident before the weights. 0 on a GPU.
    base: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.workspace + self.base

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV": self.kv, "workspace": self.workspace, "process": self.base}
        text = ", ".join(f"{name} {size / (1 << 20):.1f} MiB" for name, size in parts.items())
        return f"{text}, together {self.total / (1 << 20):.1f} MiB"


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU as its driver tells."""

    free: int
    total: int

    @classmethod
    def of(cls, device: str) -> GpuMemory:
        return cls(*torch.cuda.mem_get_info(torch.device(device)))


def resident() -> int:
    """Bytes of this process in memory now."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def cpu_kv_bytes(settings: RunnerSettings) -> int:
    """The setting, or min(1 GiB, a quarter of the memory that the process may use)."""
    return settings.kv_cache_bytes or min(_GIB, memory_limit() // 4)


def gpu_kv_bytes(utilization: float, before: GpuMemory, after: GpuMemory, activations: int) -> int:
    """KV bytes of a GPU: utilization × total − weights − activations, and no more than is free.

    before, after: the GPU without and with the weights. activations: peak of the largest step, beyond the weights.
    What other processes hold is theirs: the utilization is this engine's share of the whole GPU.

    Raises:
        ValueError: other processes hold too much of the share, or nothing of it is left; with all numbers.
    """
    share, weights = int(utilization * before.total), before.free - after.free
    numbers = f"gpu_memory_utilization {utilization} of {before.total} bytes is {share}"
    if before.free < share:
        raise ValueError(
            f"{numbers}, but only {before.free} bytes were free at start: lower it, or end what else uses the GPU"
        )
    left = min(share - weights - activations, after.free - activations)
    if left <= 0:
        raise ValueError(
            f"nothing is left for the KV cache: {numbers}, the weights take {weights} and the activations of a step "
            f"{activations}: raise it, or lower max_num_batched_tokens or max_num_seqs"
        )
    return left


def activation_peak(
    settings: RunnerSettings,
    max_model_len: int,
    new_kv: Callable[[int], KV],
    forward: Callable[[StepBatch, KV], Any],
    sampler: Any,
) -> int:
    """Bytes that the largest step takes on the GPU beyond what is there: it is run once, over a KV cache of its own."""
    device = torch.device(settings.device)
    tokens = max(2, settings.max_num_batched_tokens)
    longest = min(tokens, max_model_len)
    blocks = -(-longest // settings.block_size)
    lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    sequences = [Sequence(-1 - index, 0, params, [0] * length, length) for index, length in enumerate(lengths)]
    # All share one block table: what they write over each other is thrown away.
    slices = [Slice(sequence, list(range(blocks)), 0, sequence.prompt_len) for sequence in sequences]
    kv = new_kv(blocks)
    # One row less than the step has, so that it is no decode step to be captured.
    rows = np.arange(min(settings.max_num_seqs, tokens - 1), dtype=np.int64)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    logits = forward(build_batch(slices, rows, settings.block_size, blocks), kv)
    sampler.sample(logits, [Row(sequences[0], (), None)] * len(rows))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - held
    for sequence in sequences:
        sampler.forget(sequence.id)
    del logits, kv
    torch.cuda.empty_cache()
    return int(peak)


def step_bytes(rows: int, widths: int, out_rows: int, vocab: int) -> int:
    """Working memory of a step in fp32: `widths` numbers per row, and two copies of the logits (raw and processed)."""
    return 4 * (rows * widths + 2 * out_rows * vocab)
