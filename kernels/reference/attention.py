"""Paged attention, KV write and RoPE in plain torch: slow, sequence by sequence, and easy to check by eye."""

from __future__ import annotations

import torch


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Causal attention of each query row over its sequence's cached KV, computed and returned in `dtype`.

    q: [T, Hq, D]; k_cache, v_cache: [num_blocks, Hkv, block_size, D]; query_start: [S + 1]; context_lens: [S];
    block_tables: [S, max_blocks]; sinks: [Hq]; k_scale, v_scale: [num_blocks, Hkv, block_size]. Returns [T, Hq, D];
    rows that see no key are 0.
    """
    tokens, q_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    out = torch.zeros(tokens, q_heads, head_dim, dtype=dtype, device=q.device)
    for seq, context in enumerate(context_lens.tolist()):
        begin, end = int(query_start[seq]), int(query_start[seq + 1])
        if begin == end or context == 0:
            continue
        positions = torch.arange(context, device=q.device)
        pages = block_tables[seq].long()[positions // block_size]
        slots = positions % block_size
        k = k_cache[pages, :, slots].to(dtype)
        v = v_cache[pages, :, slots].to(dtype)
        if k_scale is not None and v_scale is not None:
            k = k * k_scale[pages, :, slots].to(dtype)[..., None]
            v = v * v_scale[pages, :, slots].to(dtype)[..., None]
        k = k.repeat_interleave(q_heads // kv_heads, dim=1)
        v = v.repeat_interleave(q_heads // kv_heads, dim=1)
        scores = torch.einsum("thd,shd->hts", q[begin:end].to(dtype), k) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        rows = torch.arange(context - (end - begin), context, device=q.device)
        visible = positions[None, :] <= rows[:, None]
        if window is not None:
            visible &= rows[:, None] - positions[None, :] < window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            column = sinks.to(dtype)[:, None, None].expand(-1, end - begin, 1)
            weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        out[begin:end] = torch.einsum("hts,shd->thd", weights, v)
    return out


def rotary_table(
    positions: int, rotary_dim: int, theta: float = 10000.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """cos and sin of position · theta^(−2i / rotary_dim), [positions, rotary_dim]: first half cos, second half sin."""
    inverse = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse[None, :]
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotary embedding of the first table.shape[1] dims of x [T, H, D] (RoFormer, arXiv 2104.09864), in fp32 or wider.

    NeoX style pairs dim i with i + R/2; the interleaved style pairs 2i with 2i + 1.
    """
    rotary_dim = table.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = table[positions.long()].to(wide).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    head, rest = x[..., :rotary_dim].to(wide), x[..., rotary_dim:]
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    else:
        first, second = head.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Stores k, v [T, Hkv, D] at slots [T] (block · block_size + offset; negative: skip), in the caches' dtype.

    With scales ([num_blocks, Hkv, block_size] fp32) a row is divided by max|x| / largest fp8 value of its token and
    head.
    """
    block_size = k_cache.shape[2]
    kept = slots >= 0
    pages = slots[kept].long() // block_size
    offsets = slots[kept].long() % block_size
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = x[kept]
        if scale is None:
            cache[pages, :, offsets] = rows.to(cache.dtype)
            continue
        limit = torch.finfo(cache.dtype).max
        wide = rows.to(torch.float32)
        row_scale = wide.abs().amax(dim=-1).clamp_min(1e-12) / limit
        quantised = (wide / row_scale[..., None]).clamp(-limit, limit)
        cache[pages, :, offsets] = quantised.to(cache.dtype)
        scale[pages, :, offsets] = row_scale
