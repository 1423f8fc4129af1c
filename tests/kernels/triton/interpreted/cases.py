"""Inputs of the interpreter tests. Whatever no sequence owns is NaN, so that a read outside its bounds shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.triton.attention import AttentionBatch

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True)
class PagedCase:
    """Queries and a paged cache of ragged sequences."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    batch: AttentionBatch

    @property
    def reference_args(self) -> tuple[torch.Tensor, ...]:
        batch = self.batch
        return (self.q, self.k_cache, self.v_cache, batch.query_start, batch.context_lens, batch.block_tables)

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}


def paged_case(
    contexts: list[int],
    queries: list[int],
    *,
    q_heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> PagedCase:
    """Sequences of the given KV lengths with the given numbers of query rows at their ends, blocks in random order."""
    kv_dtype = kv_dtype or dtype
    widest = max([-(-length // block_size) for length in contexts] or [0]) + 1
    blocks = len(contexts) * widest + 1
    tables = torch.randperm(blocks)[: len(contexts) * widest].view(-1, widest).int()
    shape = (blocks, kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.full(shape, float("nan")).to(kv_dtype) for _ in range(2))
    k_scale = v_scale = None
    if kv_dtype in FP8:
        k_scale, v_scale = (torch.full(shape[:3], float("nan")) for _ in range(2))
    for sequence, length in enumerate(contexts):
        places = torch.arange(length)
        pages, slots = tables[sequence].long()[places // block_size], places % block_size
        for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)):
            cache[pages, :, slots] = torch.randn(length, kv_heads, head_dim).to(kv_dtype)
            if scale is not None:
                scale[pages, :, slots] = torch.rand(length, kv_heads) + 0.5
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    batch = AttentionBatch(
        starts, torch.tensor(contexts, dtype=torch.int32), tables, max(queries or [0]), max(contexts or [0])
    )
    q = torch.randn(sum(queries), q_heads, head_dim).to(dtype)
    return PagedCase(q, k_cache, v_cache, k_scale, v_scale, batch)


def tolerance(dtype: torch.dtype) -> float:
    """Largest error of an attention output, relative to values near 1, that rounding to `dtype` explains."""
    return {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
