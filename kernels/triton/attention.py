"""Paged attention on Triton: checks, choice of tile and splits, launch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from kernels.triton import attention_kernels as device
from kernels.triton.configs import Tile, check_fp8, current_target, tile

HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
# Length of a split in the deterministic mode, in positions: fixed, so that no bit depends on who else is in the batch.
SPLIT_SIZE = 1024
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which query rows belong to which sequence, and where their KV lies.

    query_start: int32 [S + 1], first row of each sequence; context_lens: int32 [S], KV length with this step's tokens;
    block_tables: int32 [S, max_blocks]; max_query_len and max_context_len bound the two (they may be upper bounds).
    """

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_query_len: int
    max_context_len: int


def pad_head(head_dim: int) -> int:
    """The power of two that a head is padded to inside a tile."""
    return max(16, 1 << (head_dim - 1).bit_length())


def attention_tile(target: str, head_dim: int, group: int, *, deterministic: bool, decode: bool) -> Tile:
    """The tile for a head size; the deterministic mode has one tile for prefill and decode alike."""
    kind = "deterministic" if deterministic else "decode" if decode else "prefill"
    chosen = tile(target, "attention", f"{kind}-{max(64, pad_head(head_dim))}")
    return replace(chosen, block_m=max(chosen.block_m, 1 << (group - 1).bit_length()))


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    deterministic: bool = True,
    split_size: int = SPLIT_SIZE,
    parallel_splits: bool | None = None,
    config: Tile | None = None,
) -> torch.Tensor:
    """Causal attention of each query row over its sequence's cached keys and values.

    q: [T, Hq, D], bf16, fp16 or fp32; k_cache, v_cache: [num_blocks, Hkv, block_size, D] of q's dtype or fp8 e4m3 with
    k_scale and v_scale fp32 [num_blocks, Hkv, block_size]; sinks: [Hq] logits that take part in the normalisation only.
    Row i of a sequence stands at position context_len − query_len + i and sees positions ≤ its own, at most `window` of
    them. Returns [T, Hq, D]; rows of empty sequences and rows behind the last sequence are left as they are in `out`.

    deterministic: a row's bits depend on its own sequence alone (one tile shape, splits of split_size merged in order).
    parallel_splits: one program per split; None chooses by the amount of work and never changes a bit when
    deterministic. Raises ValueError for shapes, dtypes or options outside this.
    """
    _check(q, k_cache, v_cache, batch, window, softcap, sinks, k_scale, v_scale)
    tokens, q_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = q_heads // kv_heads
    sequences = batch.context_lens.shape[0]
    out = torch.zeros_like(q) if out is None else out
    if tokens == 0 or sequences == 0:
        return out
    decode = batch.max_query_len * group <= 16
    chosen = config or attention_tile(current_target(), head_dim, group, deterministic=deterministic, decode=decode)
    if group > chosen.block_m:
        raise ValueError(f"a tile of {chosen.block_m} rows does not hold a token's {group} query heads")
    if split_size % chosen.block_n:
        raise ValueError(f"split_size {split_size} is no multiple of the KV tile {chosen.block_n}")
    query_blocks = tokens // (chosen.block_m // group) + sequences
    splits = triton.cdiv(max(batch.max_context_len, 1), split_size)
    if parallel_splits is None:
        parallel_splits = splits > 1 and query_blocks * kv_heads <= _programs_wanted(q.device)
    mode = device.PARTIAL if parallel_splits else device.IN_ORDER if deterministic else device.ONE_SPLIT
    head_pad = pad_head(head_dim)
    partial_acc = partial_max = partial_sum = q
    if parallel_splits:
        partial_acc = torch.empty(tokens, q_heads, splits, head_pad, dtype=torch.float32, device=q.device)
        partial_max = torch.empty(tokens, q_heads, splits, dtype=torch.float32, device=q.device)
        partial_sum = torch.empty_like(partial_max)
    scale_strides = (0, 0) if k_scale is None else (k_scale.stride(0), k_scale.stride(1))
    device.paged_attention_kernel[(query_blocks, kv_heads, splits if parallel_splits else 1)](
        out,
        q,
        k_cache,
        v_cache,
        k_cache if k_scale is None else k_scale,
        v_cache if v_scale is None else v_scale,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        q if sinks is None else sinks,
        partial_acc,
        partial_max,
        partial_sum,
        sequences,
        scale,
        softcap,
        window or 0,
        split_size,
        splits,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        batch.block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        *scale_strides,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_SIZE=block_size,
        BLOCK_M=chosen.block_m,
        BLOCK_N=chosen.block_n,
        HAS_SOFTCAP=softcap > 0.0,
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        HAS_SCALES=k_scale is not None,
        SPLITS=mode,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    if parallel_splits:
        device.combine_splits_kernel[(tokens, q_heads)](
            out,
            batch.query_start,
            batch.context_lens,
            q if sinks is None else sinks,
            partial_acc,
            partial_max,
            partial_sum,
            sequences,
            split_size,
            splits,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            HEAD_PAD=head_pad,
            HAS_SINKS=sinks is not None,
            num_warps=1,
        )
    return out


def _programs_wanted(device_: torch.device) -> int:
    """Programs that fill the device about twice; below that, splits run in parallel."""
    if device_.type != "cuda":
        return 0
    return 2 * torch.cuda.get_device_properties(device_).multi_processor_count


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    window: int | None,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Raises ValueError for what the kernel does not take."""
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError(f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}")
    if q.stride(-1) != 1 or k_cache.stride(-1) != 1 or batch.block_tables.stride(-1) != 1:
        raise ValueError("the last dimension of q, k_cache, v_cache and block_tables must be contiguous")
    head_dim, (_, kv_heads, block_size, kv_dim) = q.shape[2], k_cache.shape
    if head_dim != kv_dim or head_dim > 256 or head_dim % 8:
        raise ValueError(f"head dim {head_dim} (KV: {kv_dim}) is not a common multiple of 8 up to 256")
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {kv_heads} KV heads")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block size {block_size} is not one of {BLOCK_SIZES}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} is below 1")
    if softcap < 0.0:
        raise ValueError(f"softcap {softcap} is negative")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks {tuple(sinks.shape)}, wanted ({q.shape[1]},)")
    fp8 = k_cache.dtype in FP8_DTYPES
    if not fp8 and k_cache.dtype != q.dtype:
        raise ValueError(f"KV dtype {k_cache.dtype} is neither q's {q.dtype} nor fp8 e4m3")
    if fp8 != (k_scale is not None) or fp8 != (v_scale is not None):
        raise ValueError("fp8 KV needs k_scale and v_scale; other KV takes none")
    if fp8:
        check_fp8(k_cache.dtype)
    if k_scale is not None and v_scale is not None:
        wanted = k_cache.shape[:3]
        if k_scale.shape != wanted or v_scale.shape != wanted or k_scale.stride() != v_scale.stride():
            raise ValueError(f"k_scale {tuple(k_scale.shape)}, v_scale {tuple(v_scale.shape)}, wanted {tuple(wanted)}")
    for name, tensor in (("query_start", batch.query_start), ("context_lens", batch.context_lens)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} is {tensor.dtype}, wanted int32")
