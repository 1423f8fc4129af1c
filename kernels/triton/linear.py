"""Dense linears whose bits do not depend on the number of rows: bf16, fp16 and fp32, and W8A8 in int8 and fp8.

One tile shape whatever M is, K walked in ascending order; split-K has a number of splits that depends on N and K alone,
and partial sums are added in ascending order. Plain bf16 outside the deterministic mode stays with the vendor's BLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.configs import Tile, check_fp8, current_target, tile
from kernels.triton.interpreter import correct_interpreter

correct_interpreter()

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# Programs that a split-K launch aims at: the multiprocessors of a large GPU. A constant, so that it is the same
# everywhere.
SPLIT_K_PROGRAMS = 128
# Shortest K that a split is worth.
MIN_SPLIT = 512


@triton.jit
def linear_kernel(
    out,
    x,
    weight,
    bias,
    x_scale,
    w_scale,
    partial,
    M,
    N,
    K,
    split_length,
    stride_x,
    stride_weight,
    stride_out,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    INTEGER: tl.constexpr,
    FP8: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = x · weightᵀ (· x_scale · w_scale) + bias. Grid: (N tiles, M tiles, splits)."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row_ok = rows < M
    column_ok = columns < N
    x_rows = x + rows.to(tl.int64)[:, None] * stride_x
    w_columns = weight + columns.to(tl.int64)[None, :] * stride_weight
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32 if INTEGER else tl.float32)
    for start in range(split * split_length, tl.minimum((split + 1) * split_length, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_tile = tl.load(x_rows + k[None, :], mask=row_ok[:, None] & (k < K)[None, :], other=0.0)
        w_tile = tl.load(w_columns + k[:, None], mask=column_ok[None, :] & (k < K)[:, None], other=0.0)
        if INTEGER:
            acc = tl.dot(x_tile, w_tile, acc, out_dtype=tl.int32)
        elif FP8:
            # Hopper keeps about 14 bits inside an fp8 dot: move to fp32 every 32 products.
            acc = tl.dot(x_tile, w_tile, acc, max_num_imprecise_acc=32)
        else:
            acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
    inside = row_ok[:, None] & column_ok[None, :]
    if SPLITS > 1:
        offsets = (split.to(tl.int64) * M + rows[:, None]) * N + columns[None, :]
        tl.store(partial + offsets, acc, mask=inside)
    else:
        result = acc.to(tl.float32)
        if HAS_SCALES:
            result = result * tl.load(x_scale + rows, mask=row_ok, other=0.0)[:, None]
            result = result * tl.load(w_scale + columns, mask=column_ok, other=0.0)[None, :]
        if HAS_BIAS:
            result += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)[None, :]
        target = out + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_splits_kernel(
    out,
    partial,
    bias,
    x_scale,
    w_scale,
    M,
    N,
    stride_out,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the splits of a row in ascending order, then scales and bias. Grid: (rows, N / BLOCK_N)."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < N
    total = tl.load(partial + row.to(tl.int64) * N + columns, mask=inside, other=0)
    for split in range(1, SPLITS):
        total += tl.load(partial + (split * M + row).to(tl.int64) * N + columns, mask=inside, other=0)
    result = total.to(tl.float32)
    if HAS_SCALES:
        result = result * tl.load(x_scale + row)
        result = result * tl.load(w_scale + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * stride_out + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def quantize_rows_kernel(
    codes,
    scales,
    x,
    width,
    stride_codes,
    stride_x,
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """codes = round(x / scale) with scale = max|x| / LIMIT per row. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    amax = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride_x + columns, mask=columns < width, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.abs(value))
    scale = tl.maximum(tl.max(amax, 0), 1e-12) / LIMIT
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride_x + columns, mask=columns < width, other=0.0).to(tl.float32) / scale
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
        if INTEGER:
            # Adding 1.5 · 2²³ leaves no fraction bits: round to nearest even.
            value = (value + 12582912.0) - 12582912.0
        tl.store(codes + row * stride_codes + columns, value.to(codes.dtype.element_ty), mask=columns < width)


def add_splits(
    out: torch.Tensor,
    partial: torch.Tensor,
    bias: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Adds partial sums [splits, M, N] into out [M, N] in ascending order, then scales ([M], [N]) and bias."""
    splits, m, n = partial.shape
    # What a launch does not use still needs a pointer: out stands in.
    x_scale, w_scale = scales if scales is not None else (out, out)
    add_splits_kernel[(m, triton.cdiv(n, 512))](
        out,
        partial,
        out if bias is None else bias,
        x_scale,
        w_scale,
        m,
        n,
        out.stride(0),
        HAS_BIAS=bias is not None,
        HAS_SCALES=scales is not None,
        SPLITS=splits,
        BLOCK_N=512,
    )


def split_k(n: int, k: int, chosen: Tile) -> tuple[int, int]:
    """(splits, length of a split): from N and K alone, so that no row's bits depend on M."""
    tiles = triton.cdiv(n, chosen.block_n)
    splits = max(1, min(SPLIT_K_PROGRAMS // tiles, k // MIN_SPLIT))
    length = triton.cdiv(triton.cdiv(k, splits), chosen.block_k) * chosen.block_k
    return triton.cdiv(k, length), length


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    out_dtype: torch.dtype,
    kind: str,
    config: Tile | None,
) -> torch.Tensor:
    m, k = x.shape
    n = weight.shape[0]
    if weight.shape[1] != k or x.dtype != weight.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit weight {tuple(weight.shape)} {weight.dtype}")
    if x.stride(1) != 1 or weight.stride(1) != 1 or (bias is not None and bias.shape != (n,)):
        raise ValueError("rows of x and weight must be contiguous, and bias [N]")
    out = torch.empty(m, n, dtype=out_dtype, device=x.device)
    if m == 0:
        return out
    chosen = config or tile(current_target(), "linear", kind)
    splits, length = split_k(n, k, chosen)
    integer = x.dtype == torch.int8
    partial = out
    if splits > 1:
        partial = torch.empty(splits, m, n, dtype=torch.int32 if integer else torch.float32, device=x.device)
    x_scale, w_scale = scales if scales is not None else (x, x)
    linear_kernel[(triton.cdiv(n, chosen.block_n), triton.cdiv(m, chosen.block_m), splits)](
        out,
        x,
        weight,
        x if bias is None else bias,
        x_scale,
        w_scale,
        partial,
        m,
        n,
        k,
        length,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        HAS_BIAS=bias is not None,
        HAS_SCALES=scales is not None,
        INTEGER=integer,
        FP8=x.dtype in FP8_DTYPES,
        SPLITS=splits,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        BLOCK_K=chosen.block_k,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    if splits > 1:
        add_splits(out, partial, bias, scales)
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Tile | None = None,
) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ + bias [N] → [M, N], batch-invariant; bf16, fp16 or fp32, accumulated in fp32.

    Raises ValueError for shapes or dtypes that do not fit each other.
    """
    kind = "fp32" if x.dtype == torch.float32 else "bf16"
    return _linear(x, weight, bias, None, out_dtype or x.dtype, kind, config)


def linear_w8a8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: Tile | None = None,
) -> torch.Tensor:
    """int8 or fp8-e4m3 linear: x [M, K] with a scale per row fp32 [M], weight [N, K] with a scale per output fp32 [N].

    int8 sums are exact in int32. Raises ValueError for other dtypes or shapes that do not fit.
    """
    if x.dtype != torch.int8 and x.dtype not in FP8_DTYPES:
        raise ValueError(f"x is {x.dtype}, wanted int8 or fp8 e4m3")
    if x_scale.shape != (x.shape[0],) or w_scale.shape != (weight.shape[0],):
        raise ValueError(f"x_scale {tuple(x_scale.shape)}, w_scale {tuple(w_scale.shape)}")
    kind = "int8" if x.dtype == torch.int8 else "fp8"
    if kind == "fp8":
        check_fp8(x.dtype)
    return _linear(x, weight, bias, (x_scale, w_scale), out_dtype, kind, config)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] → (codes [M, K] of `dtype`, scales fp32 [M]); dtype is int8 or fp8 e4m3. Rows must be contiguous."""
    if dtype != torch.int8 and dtype not in FP8_DTYPES:
        raise ValueError(f"dtype is {dtype}, wanted int8 or fp8 e4m3")
    if dtype != torch.int8:
        check_fp8(dtype)
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        limit = 127 if dtype == torch.int8 else int(torch.finfo(dtype).max)
        quantize_rows_kernel[(rows,)](
            codes,
            scales,
            x,
            width,
            codes.stride(0),
            x.stride(0),
            LIMIT=limit,
            INTEGER=dtype == torch.int8,
            BLOCK=min(2048, triton.next_power_of_2(width)),
        )
    return codes, scales
