"""Captured decode steps: one graph per bucket of rows, captured lazily, run on static inputs.

A step qualifies when every row's logits are wanted, as in decoding and verification. It is padded to its bucket:
padding rows belong to no sequence, keep no KV, and the kernels leave them alone. The deterministic kernels give a row
the same bits in a graph as eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.triton.attention import AttentionBatch

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Eager steps of a bucket before it is captured without an idle gap.
PATIENCE = 64
# KV lengths of a captured step are bounded by one of these, so that short contexts do not launch empty splits.
CONTEXTS = (1024, 4096, 16384, 65536, 262144, 1048576)

# Runs the step on static inputs, and returns the static output.
Replay = Callable[[], torch.Tensor]
# Captures a step: a function without arguments → its replay.
Capture = Callable[[Callable[[], torch.Tensor]], Replay]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device. token_ids, slots, logit_rows: int64; positions: int32; slots −1: the row keeps no KV."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    attention: AttentionBatch
    logit_rows: torch.Tensor


def capture_cuda(step: Callable[[], torch.Tensor]) -> Replay:
    """Captures a step into a CUDA (or HIP) graph after two warm-up runs, which also compile its kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


@dataclass(slots=True)
class _Captured:
    inputs: StepInputs
    replay: Replay


class DecodeGraphs:
    """Captured steps by (rows, bound of the KV length). One thread calls it.

    step: (inputs, kv) → logits [rows, vocab]; capture: how a step is captured; max_context: longest KV of a sequence.
    """

    def __init__(
        self,
        step: Callable[[StepInputs, Any], torch.Tensor],
        capture: Capture,
        max_context: int,
        patience: int = PATIENCE,
    ) -> None:
        self._step, self._capture, self._patience = step, capture, patience
        self._contexts = (*(bound for bound in CONTEXTS if bound < max_context), max_context)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._wanted: Counter[tuple[int, int]] = Counter()
        self._kv: Any = None
        self._table_width = 0

    def run(self, step: StepInputs, kv: Any) -> torch.Tensor | None:
        """Logits of a step in its graph, valid until the next call; None: run it eagerly (its bucket is noted)."""
        key = self._bucket(step)
        if key is None:
            return None
        if kv is not self._kv:
            # Graphs hold addresses: another cache (an embedding's own) needs no graph, a new one new graphs.
            if self._kv is not None:
                return None
            self._kv = kv
            self._table_width = -(-self._contexts[-1] // kv.block_size)
        found = self._captured.get(key)
        if found is None:
            self._wanted[key] += 1
            if self._wanted[key] < self._patience:
                return None
            found = self._capture_bucket(key)
        self._fill(found.inputs, step)
        return found.replay()[: step.token_ids.shape[0]]

    def capture_next(self) -> bool:
        """Captures the most wanted bucket; for idle gaps. Returns whether another is waiting."""
        if self._wanted:
            self._capture_bucket(self._wanted.most_common(1)[0][0])
        return bool(self._wanted)

    @property
    def captured(self) -> list[tuple[int, int]]:
        """Buckets with a graph, as (rows, bound of the KV length)."""
        return sorted(self._captured)

    def _bucket(self, step: StepInputs) -> tuple[int, int] | None:
        rows = step.token_ids.shape[0]
        # Every row wants logits: no prefill is among them, and the rows come in their order.
        if step.logit_rows.shape[0] != rows or rows > BUCKETS[-1] or step.attention.context_lens.shape[0] > rows:
            return None
        bucket = next(size for size in BUCKETS if size >= rows)
        context = next((bound for bound in self._contexts if bound >= step.attention.max_context_len), None)
        return None if context is None else (bucket, context)

    def _capture_bucket(self, key: tuple[int, int]) -> _Captured:
        rows, context = key
        device = self._kv.keys[0].device

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # A row may hold up to all rows' worth of queries, so max_query_len is the bucket.
        attention = AttentionBatch(zeros(rows + 1), zeros(rows), zeros(rows, self._table_width), rows, context)
        inputs = StepInputs(
            zeros(rows, dtype=torch.int64),
            zeros(rows),
            torch.full((rows,), -1, dtype=torch.int64, device=device),
            attention,
            torch.arange(rows, device=device),
        )
        kv = self._kv
        captured = _Captured(inputs, self._capture(lambda: self._step(inputs, kv)))
        self._captured[key] = captured
        self._wanted.pop(key, None)
        return captured

    @staticmethod
    def _fill(static: StepInputs, step: StepInputs) -> None:
        """Copies a step into static inputs; what lies behind it becomes padding."""
        rows, sequences = step.token_ids.shape[0], step.attention.context_lens.shape[0]
        static.token_ids[:rows].copy_(step.token_ids)
        static.positions[:rows].copy_(step.positions)
        static.slots[:rows].copy_(step.slots)
        static.slots[rows:].fill_(-1)
        static.attention.query_start[: sequences + 1].copy_(step.attention.query_start)
        static.attention.query_start[sequences + 1 :].fill_(rows)
        static.attention.context_lens[:sequences].copy_(step.attention.context_lens)
        static.attention.context_lens[sequences:].zero_()
        width = min(step.attention.block_tables.shape[1], static.attention.block_tables.shape[1])
        static.attention.block_tables[:sequences, :width].copy_(step.attention.block_tables[:, :width])
