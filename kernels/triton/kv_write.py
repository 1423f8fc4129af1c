"""Rotary embedding of queries and keys, fused with the write of keys and values into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.configs import check_fp8
from kernels.triton.interpreter import correct_interpreter

correct_interpreter()


@triton.jit
def row_scale(amax, FP8_MAX: tl.constexpr):
    """The scale that maps the largest magnitude of a row to the largest fp8 value."""
    return tl.maximum(amax, 1e-12) / FP8_MAX


@triton.jit
def to_fp8(x, scale, dtype: tl.constexpr, FP8_MAX: tl.constexpr):
    """x / scale, clamped and rounded to fp8."""
    return tl.minimum(tl.maximum(x / scale, -FP8_MAX), FP8_MAX).to(dtype)


@triton.jit
def rope_write_kernel(
    q,
    k,
    v,
    table,
    positions,
    slots,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_kv_block,
    stride_kv_head,
    stride_kv_slot,
    stride_scale_block,
    stride_scale_head,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8_MAX: tl.constexpr,
):
    """Grid: (tokens, 2): index 0 rotates the query heads in place, index 1 rotates and stores keys, stores values.

    FP8_MAX is 0 for caches of the model's dtype; otherwise each token and head gets a scale of its own.
    """
    token = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, HALF_PAD)
    heads = tl.arange(0, HEADS_PAD)
    half_ok = half < ROTARY_DIM // 2
    if INTERLEAVED:
        first = 2 * half
        second = 2 * half + 1
    else:
        first = half
        second = half + ROTARY_DIM // 2
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(table + position * ROTARY_DIM + half, mask=half_ok, other=0.0)[None, :]
    sin = tl.load(table + position * ROTARY_DIM + ROTARY_DIM // 2 + half, mask=half_ok, other=0.0)[None, :]

    if tl.program_id(1) == 0:
        rows = q + token * stride_q_token + heads[:, None] * stride_q_head
        inside = (heads < Q_HEADS)[:, None] & half_ok[None, :]
        one = tl.load(rows + first[None, :], mask=inside, other=0.0).to(tl.float32)
        two = tl.load(rows + second[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(rows + first[None, :], (one * cos - two * sin).to(q.dtype.element_ty), mask=inside)
        tl.store(rows + second[None, :], (two * cos + one * sin).to(q.dtype.element_ty), mask=inside)
        return

    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    page = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head_ok = heads < KV_HEADS
    inside = head_ok[:, None] & half_ok[None, :]
    rows = k + token * stride_k_token + heads[:, None] * stride_k_head
    one = tl.load(rows + first[None, :], mask=inside, other=0.0).to(tl.float32)
    two = tl.load(rows + second[None, :], mask=inside, other=0.0).to(tl.float32)
    # Keys are rounded to the model's dtype before anything else reads them.
    k_one = (one * cos - two * sin).to(k.dtype.element_ty).to(tl.float32)
    k_two = (two * cos + one * sin).to(k.dtype.element_ty).to(tl.float32)
    rest = ROTARY_DIM + tl.arange(0, REST_PAD)
    rest_inside = head_ok[:, None] & (rest < HEAD_DIM)[None, :]
    k_rest = tl.load(rows + rest[None, :], mask=rest_inside, other=0.0).to(tl.float32)
    dims = tl.arange(0, HEAD_PAD)
    v_inside = head_ok[:, None] & (dims < HEAD_DIM)[None, :]
    v_rows = v + token * stride_v_token + heads[:, None] * stride_v_head
    value = tl.load(v_rows + dims[None, :], mask=v_inside, other=0.0).to(tl.float32)
    target = page * stride_kv_block + heads[:, None] * stride_kv_head + offset * stride_kv_slot
    if FP8_MAX > 0:
        amax = tl.maximum(tl.max(tl.abs(k_one), 1), tl.max(tl.abs(k_two), 1))
        scale_k = row_scale(tl.maximum(amax, tl.max(tl.abs(k_rest), 1)), FP8_MAX)
        scale_v = row_scale(tl.max(tl.abs(value), 1), FP8_MAX)
        scale_target = page * stride_scale_block + heads * stride_scale_head + offset
        tl.store(k_scale + scale_target, scale_k, mask=head_ok)
        tl.store(v_scale + scale_target, scale_v, mask=head_ok)
        fp8 = k_cache.dtype.element_ty
        tl.store(k_cache + target + first[None, :], to_fp8(k_one, scale_k[:, None], fp8, FP8_MAX), mask=inside)
        tl.store(k_cache + target + second[None, :], to_fp8(k_two, scale_k[:, None], fp8, FP8_MAX), mask=inside)
        tl.store(k_cache + target + rest[None, :], to_fp8(k_rest, scale_k[:, None], fp8, FP8_MAX), mask=rest_inside)
        tl.store(v_cache + target + dims[None, :], to_fp8(value, scale_v[:, None], fp8, FP8_MAX), mask=v_inside)
    else:
        tl.store(k_cache + target + first[None, :], k_one.to(k_cache.dtype.element_ty), mask=inside)
        tl.store(k_cache + target + second[None, :], k_two.to(k_cache.dtype.element_ty), mask=inside)
        tl.store(k_cache + target + rest[None, :], k_rest.to(k_cache.dtype.element_ty), mask=rest_inside)
        tl.store(v_cache + target + dims[None, :], value.to(v_cache.dtype.element_ty), mask=v_inside)


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Rotates q in place, and stores rotated k and v into the caches.

    q: [T, Hq, D]; k, v: [T, Hkv, D]; table: fp32 [positions, R], cos | sin, R ≤ D the rotated dims; positions: [T];
    slots: [T], block · block_size + offset, negative for rows whose KV is not kept; caches [num_blocks, Hkv,
    block_size, D] in k's dtype, or fp8 with scales fp32 [num_blocks, Hkv, block_size]. Raises ValueError otherwise.
    """
    tokens, q_heads, head_dim = q.shape
    kv_heads, rotary_dim = k.shape[1], table.shape[1]
    fp8 = k_cache.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    if rotary_dim > head_dim or rotary_dim % 2 or table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError(f"table {tuple(table.shape)} {table.dtype} for head dim {head_dim}")
    if k.shape != v.shape or k.shape[0] != tokens or k_cache.shape != v_cache.shape or k_cache.shape[1] != kv_heads:
        raise ValueError(f"k {tuple(k.shape)}, v {tuple(v.shape)}, k_cache {tuple(k_cache.shape)}")
    if not fp8 and k_cache.dtype != k.dtype:
        raise ValueError(f"KV dtype {k_cache.dtype} is neither k's {k.dtype} nor fp8 e4m3")
    if fp8 != (k_scale is not None) or fp8 != (v_scale is not None):
        raise ValueError("fp8 KV needs k_scale and v_scale; other KV takes none")
    if any(x.stride(-1) != 1 for x in (q, k, v, k_cache, v_cache)) or k_cache.stride() != v_cache.stride():
        raise ValueError("the last dimension must be contiguous, and both caches laid out alike")
    if fp8:
        check_fp8(k_cache.dtype)
    if tokens == 0:
        return
    rope_write_kernel[(tokens, 2)](
        q,
        k,
        v,
        table,
        positions,
        slots,
        k_cache,
        v_cache,
        table if k_scale is None else k_scale,
        table if v_scale is None else v_scale,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        0 if k_scale is None else k_scale.stride(0),
        0 if k_scale is None else k_scale.stride(1),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEADS_PAD=triton.next_power_of_2(max(q_heads, kv_heads)),
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        HALF_PAD=triton.next_power_of_2(rotary_dim // 2),
        REST_PAD=triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
        HEAD_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=k_cache.shape[2],
        INTERLEAVED=interleaved,
        FP8_MAX=int(torch.finfo(k_cache.dtype).max) if fp8 else 0,
        num_warps=4,
    )
