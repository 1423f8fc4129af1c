"""Attention over paged KV in plain torch, batch-invariant.

Queries go in tiles of a few tokens × the query heads of one KV head, padded to a fixed number of rows; keys in tiles of
KV_TILE at absolute positions 0, KV_TILE, …, read only as stored. A softmax is rescaled per row (Milakov and Gimelshein
2018, as in FlashAttention), always, so that a tile a row does not see changes nothing in it: p = 0, factor = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tandem.lm.batch import StepBatch
from tandem.lm.ops import ROW_TILE, exp_, padded, soft_cap_

# Keys per tile; a multiple of every block size.
KV_TILE = 128


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer attends. window counts the token itself, 0 = all; sinks: fp32 [num_heads], extra logits."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class _Group:
    """Query tiles computed together: either many sequences of one tile each, or one sequence of many tiles.

    rows: int64 [tiles, tokens], the batch rows (repeated in padding); positions: int64 [tiles, tokens] ascending;
    last: the greatest position per tile; table: int64 [tiles or 1, blocks]; contexts: int64 [tiles or 1].
    """

    rows: torch.Tensor
    positions: torch.Tensor
    first: np.ndarray
    last: np.ndarray
    table: torch.Tensor
    contexts: torch.Tensor
    max_context: int
    min_context: int
    shared: bool


def tokens_per_tile(queries_per_kv: int) -> int:
    """Query tokens in a tile: as many as fit ROW_TILE rows, at least one."""
    return max(1, ROW_TILE // queries_per_kv)


def _tiles(start: int, count: int, first_position: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and positions [tiles, width] of one slice; the last tile repeats its last token."""
    index = np.minimum(np.arange(padded(count, width)), count - 1).reshape(-1, width)
    return start + index, first_position + index


def plan(batch: StepBatch, queries_per_kv: int, device: torch.device) -> list[_Group]:
    """Groups of query tiles of a step; computed once per step and kept in the batch."""
    key = f"attention:{queries_per_kv}"
    found = batch.cache.get(key)
    if found is None:
        found = batch.cache[key] = _plan(batch, tokens_per_tile(queries_per_kv), device)
    return found  # type: ignore[return-value]


def _plan(batch: StepBatch, width: int, device: torch.device) -> list[_Group]:
    counts = np.diff(batch.query_start)
    per_tile = KV_TILE // batch.block_size
    short = np.flatnonzero(counts <= width)
    # Longest first, so that a key tile concerns a leading part of the group.
    short = short[np.argsort(-batch.context_lens[short], kind="stable")]
    groups = []
    if len(short):
        parts = [
            _tiles(int(batch.query_start[i]), int(counts[i]), int(batch.context_lens[i] - counts[i]), width)
            for i in short
        ]
        groups.append(_group(batch, short, parts, per_tile, False, device))
    for i in np.flatnonzero(counts > width):
        part = _tiles(int(batch.query_start[i]), int(counts[i]), int(batch.context_lens[i] - counts[i]), width)
        groups.append(_group(batch, np.asarray([i]), [part], per_tile, True, device))
    return groups


def _group(
    batch: StepBatch,
    which: np.ndarray,
    parts: list[tuple[np.ndarray, np.ndarray]],
    blocks_per_tile: int,
    shared: bool,
    device: torch.device,
) -> _Group:
    rows, positions = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
    contexts = batch.context_lens[which].astype(np.int64)
    blocks = padded(-(-int(contexts.max()) // batch.block_size), blocks_per_tile)
    table = np.zeros((len(which), blocks), dtype=np.int64)
    have = min(blocks, batch.block_tables.shape[1])
    table[:, :have] = batch.block_tables[which, :have]
    # Entries past a sequence's context may name blocks that are no longer its own: read block 0 and mask it.
    table[np.arange(blocks)[None, :] * batch.block_size >= contexts[:, None]] = 0
    return _Group(
        rows=torch.from_numpy(rows).to(device),
        positions=torch.from_numpy(positions).to(device),
        first=positions[:, 0],
        last=positions[:, -1],
        table=torch.from_numpy(table).to(device),
        contexts=torch.from_numpy(contexts).to(device),
        max_context=int(contexts.max()),
        min_context=int(contexts.min()),
        shared=shared,
    )


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: StepBatch, spec: AttentionSpec
) -> torch.Tensor:
    """Attention of query [padded rows, num_heads, head_dim] over one layer's KV (this step's included).

    keys and values: [num_blocks, num_kv_heads, block_size, head_dim]. Result like query; padding rows are zero.
    """
    heads, kv_heads, dim = query.shape[1], keys.shape[1], query.shape[2]
    per_kv = heads // kv_heads
    out = torch.zeros(*query.shape[:2], values.shape[3], dtype=query.dtype, device=query.device)
    for group in plan(batch, per_kv, query.device):
        tiles, width = group.rows.shape
        gathered = query[group.rows.view(-1)].view(tiles, width, kv_heads, per_kv, dim).float() * spec.scale
        # Shared keys: heads outside, so that one head's tiles are one batch of products.
        order = (2, 0, 1, 3, 4) if group.shared else (0, 2, 1, 3, 4)
        tile = gathered.permute(order).reshape(*_lead(group, tiles, kv_heads), width * per_kv, dim)
        size = padded(width * per_kv)
        if size > tile.shape[2]:
            tile = torch.cat([tile, tile[:, :, -1:].expand(-1, -1, size - tile.shape[2], -1)], dim=2)
        result = _attend(tile.contiguous(), keys, values, group, per_kv, batch.block_size, spec)
        result = result[:, :, : width * per_kv].reshape(*_lead(group, tiles, kv_heads), width, per_kv, -1)
        result = result.permute((1, 2, 0, 3, 4) if group.shared else (0, 2, 1, 3, 4))
        out[group.rows.view(-1)] = result.reshape(tiles * width, heads, -1).to(out.dtype)
    return out


def _lead(group: _Group, tiles: int, kv_heads: int) -> tuple[int, int]:
    return (kv_heads, tiles) if group.shared else (tiles, kv_heads)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: _Group,
    per_kv: int,
    block_size: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """fp32 [a, b, rows, dim]; (a, b) is (kv heads, tiles) if keys are shared, else (tiles, kv heads)."""
    lead, rows = query.shape[:2], query.shape[2]
    peak = query.new_full((*lead, rows, 1), float("-inf"))
    total = query.new_zeros((*lead, rows, 1))
    acc = query.new_zeros((*lead, rows, values.shape[3]))
    positions = _row_positions(group.positions, per_kv, rows)
    lowest = 0
    if spec.window:
        lowest = max(0, int(group.first.min()) - spec.window + 1) // KV_TILE * KV_TILE
    for start in range(lowest, group.max_context, KV_TILE):
        concerned = np.flatnonzero(group.last >= start)
        if not len(concerned):
            continue
        # Tiles are ordered so that those which see these keys are the last ones (shared) or the first ones.
        part = slice(int(concerned[0]), query.shape[1]) if group.shared else slice(0, int(concerned[-1]) + 1)
        view = (slice(None), part) if group.shared else (part,)
        key, value = _load(keys, values, group, part, start, block_size)
        scores = _scores(query[view], key, group.shared)
        if spec.softcap:
            scores = soft_cap_(scores, spec.softcap)
        _mask(scores, positions[part], start, spec.window, group, part)
        best = torch.maximum(peak[view], scores.amax(-1, keepdim=True))
        safe = torch.where(best == float("-inf"), torch.zeros_like(best), best)
        weights = exp_(scores.sub_(safe))
        factor = exp_((peak[view] - safe).contiguous())
        total[view] = total[view] * factor + weights.sum(-1, keepdim=True)
        acc[view] = acc[view] * factor + _mix(weights, value, group.shared)
        peak[view] = best
    if spec.sinks is not None:
        total, acc = _add_sinks(peak, total, acc, spec.sinks, group.shared, per_kv)
    return acc / total


def _row_positions(positions: torch.Tensor, per_kv: int, rows: int) -> torch.Tensor:
    """int64 [tiles, rows]: position of each row of a tile; padding rows take the last one's."""
    spread = positions.repeat_interleave(per_kv, dim=1)
    if spread.shape[1] < rows:
        spread = torch.cat([spread, spread[:, -1:].expand(-1, rows - spread.shape[1])], dim=1)
    return spread


def _load(
    keys: torch.Tensor, values: torch.Tensor, group: _Group, part: slice, start: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One key tile, fp32 [sequences, kv heads, KV_TILE, dim] each; what lies past a context is zero."""
    first, count = start // block_size, KV_TILE // block_size
    table = group.table if group.shared else group.table[part]
    blocks = table[:, first : first + count]
    pair = [
        tensor[blocks].permute(0, 2, 1, 3, 4).reshape(blocks.shape[0], tensor.shape[1], KV_TILE, -1).float()
        for tensor in (keys, values)
    ]
    if start + KV_TILE > group.min_context:
        contexts = group.contexts if group.shared else group.contexts[part]
        beyond = torch.arange(start, start + KV_TILE, device=keys.device)[None, :] >= contexts[:, None]
        # Unwritten slots may hold anything, NaN too, and 0 · NaN is NaN.
        pair = [tensor.masked_fill(beyond[:, None, :, None], 0.0) for tensor in pair]
    return pair[0], pair[1]


def _scores(query: torch.Tensor, key: torch.Tensor, shared: bool) -> torch.Tensor:
    """Products of query [a, b, rows, dim] with keys: [a, b, rows, KV_TILE]."""
    a, b, rows, dim = query.shape
    if not shared:
        return torch.bmm(query.reshape(a * b, rows, dim), key.view(a * b, KV_TILE, dim).transpose(1, 2)).view(
            a, b, rows, KV_TILE
        )
    out = query.new_empty(a, b, rows, KV_TILE)
    for head in range(a):
        torch.bmm(query[head], key[0, head].t().unsqueeze(0).expand(b, dim, KV_TILE), out=out[head])
    return out


def _mix(weights: torch.Tensor, value: torch.Tensor, shared: bool) -> torch.Tensor:
    """Weights [a, b, rows, KV_TILE] times values: [a, b, rows, dim]."""
    a, b, rows, _ = weights.shape
    dim = value.shape[-1]
    if not shared:
        return torch.bmm(weights.view(a * b, rows, KV_TILE), value.view(a * b, KV_TILE, dim)).view(a, b, rows, dim)
    out = weights.new_empty(a, b, rows, dim)
    for head in range(a):
        torch.bmm(weights[head], value[0, head].unsqueeze(0).expand(b, KV_TILE, dim), out=out[head])
    return out


def _mask(scores: torch.Tensor, positions: torch.Tensor, start: int, window: int, group: _Group, part: slice) -> None:
    """Sets scores of keys that a row may not see to -inf, in place."""
    below = group.first[part].min() >= start + KV_TILE - 1
    inside = not window or group.last[part].max() - window < start
    if below and inside:
        return
    key_positions = torch.arange(start, start + KV_TILE, device=scores.device)
    hidden = key_positions > positions[..., None]
    if window:
        hidden |= key_positions <= positions[..., None] - window
    scores.masked_fill_(hidden.unsqueeze(0) if group.shared else hidden.unsqueeze(1), float("-inf"))


def _add_sinks(
    peak: torch.Tensor, total: torch.Tensor, acc: torch.Tensor, sinks: torch.Tensor, shared: bool, per_kv: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds exp(sink) of each query head to the softmax's denominator (gpt-oss)."""
    rows, kv_heads = peak.shape[2], sinks.numel() // per_kv
    index = torch.arange(rows, device=sinks.device) % per_kv
    sink = sinks.float().view(kv_heads, per_kv)[:, index]
    sink = sink[:, None, :, None] if shared else sink[None, :, :, None]
    best = torch.maximum(peak, sink)
    factor = exp_(peak - best)
    return total * factor + exp_((sink - best).contiguous()), acc * factor
