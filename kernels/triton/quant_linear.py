"""Linear with group-quantised weights (4 or 8 bits) and 16- or 32-bit activations, on the layout of kernels.packing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.packing import PackedWeight
from kernels.triton.configs import Tile, current_target, tile
from kernels.triton.interpreter import correct_interpreter
from kernels.triton.linear import add_splits, split_k

correct_interpreter()


@triton.jit
def dequantise(codes, group, columns, column_ok, scales, zeros, minimums, N, MODE: tl.constexpr, dtype: tl.constexpr):
    """(code − zero) · scale + minimum for one group of 32 rows, rounded to the activations' dtype."""
    offsets = group * N + columns
    scale = tl.load(scales + offsets, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    value = codes.to(tl.float32)
    if MODE == 1:
        value = (value - tl.load(zeros + offsets, mask=column_ok, other=0.0).to(tl.float32)[None, :]) * scale
    elif MODE == 2:
        value = value * scale + tl.load(minimums + offsets, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    else:
        value = value * scale
    return value.to(dtype)


@triton.jit
def quant_linear_kernel(
    out,
    x,
    codes,
    scales,
    zeros,
    minimums,
    permutation,
    bias,
    partial,
    M,
    N,
    K,
    split_length,
    stride_x,
    stride_out,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MODE: tl.constexpr,
    PERMUTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = x · weightᵀ + bias over tiles of 64 along K, each as two halves of 32. Grid: (N tiles, M tiles, splits).

    MODE: 0 scale only, 1 zero points, 2 minimums.
    """
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row_ok = rows < M
    column_ok = columns < N
    half = tl.arange(0, 32)
    x_rows = x + rows.to(tl.int64)[:, None] * stride_x
    dtype = x.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(split * split_length, tl.minimum((split + 1) * split_length, K), 64):
        low_k = start + half
        high_k = low_k + 32
        if BITS == 4:
            packed_rows = (start // 2 + half).to(tl.int64)
            packed = tl.load(codes + packed_rows[:, None] * N + columns[None, :], mask=column_ok[None, :], other=0)
            low = packed & 0xF
            high = packed >> 4
        else:
            target = codes + low_k.to(tl.int64)[:, None] * N + columns[None, :]
            low = tl.load(target, mask=column_ok[None, :], other=0)
            high = tl.load(target + 32 * N, mask=column_ok[None, :], other=0)
        low_w = dequantise(low, start // GROUP, columns, column_ok, scales, zeros, minimums, N, MODE, dtype)
        high_w = dequantise(high, (start + 32) // GROUP, columns, column_ok, scales, zeros, minimums, N, MODE, dtype)
        low_ok = row_ok[:, None] & (low_k < K)[None, :]
        high_ok = row_ok[:, None] & (high_k < K)[None, :]
        if PERMUTED:
            low_k = tl.load(permutation + low_k)
            high_k = tl.load(permutation + high_k)
        low_x = tl.load(x_rows + low_k[None, :], mask=low_ok, other=0.0)
        high_x = tl.load(x_rows + high_k[None, :], mask=high_ok, other=0.0)
        acc = tl.dot(low_x, low_w, acc, input_precision="ieee")
        acc = tl.dot(high_x, high_w, acc, input_precision="ieee")
    inside = row_ok[:, None] & column_ok[None, :]
    if SPLITS > 1:
        offsets = (split.to(tl.int64) * M + rows[:, None]) * N + columns[None, :]
        tl.store(partial + offsets, acc, mask=inside)
    else:
        if HAS_BIAS:
            acc += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
        target = out + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
        tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


def quant_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    deterministic: bool = True,
    out_dtype: torch.dtype | None = None,
    config: Tile | None = None,
) -> torch.Tensor:
    """x [M, K] · weightᵀ + bias [N] → [M, N]; x is bf16, fp16 or fp32, accumulated in fp32.

    deterministic: one tile shape for every M, so that a row's bits do not depend on M; otherwise small M has its own.
    The number of K splits depends on N and K alone. Raises ValueError for shapes that do not fit.
    """
    m, k = x.shape
    if k != weight.in_features or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight with K = {weight.in_features}")
    n = weight.out_features
    out = torch.empty(m, n, dtype=out_dtype or x.dtype, device=x.device)
    if m == 0:
        return out
    kind = "deterministic" if deterministic else "small" if m <= 16 else "large"
    chosen = config or tile(current_target(), "quant_linear", kind)
    splits, length = split_k(n, k, chosen)
    partial = out if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    none = weight.scales
    quant_linear_kernel[(triton.cdiv(n, chosen.block_n), triton.cdiv(m, chosen.block_m), splits)](
        out,
        x,
        weight.codes,
        weight.scales,
        none if weight.zeros is None else weight.zeros,
        none if weight.minimums is None else weight.minimums,
        none if weight.permutation is None else weight.permutation,
        none if bias is None else bias,
        partial,
        m,
        n,
        k,
        length,
        x.stride(0),
        out.stride(0),
        GROUP=weight.group_size,
        BITS=weight.bits,
        MODE=1 if weight.zeros is not None else 2 if weight.minimums is not None else 0,
        PERMUTED=weight.permutation is not None,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    if splits > 1:
        add_splits(out, partial, bias, None)
    return out
