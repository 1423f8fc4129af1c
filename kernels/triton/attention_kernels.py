"""Attention over paged KV: one kernel family for prefill, chunked prefill, decode and verification.

A program owns a tile of BLOCK_M rows (query tokens × the query heads that share one KV head) of one sequence and
walks the KV tiles at absolute positions 0, BLOCK_N, 2·BLOCK_N, …, with the online softmax in base 2. Positions are
grouped into splits of a fixed length; each split has its own running maximum, sum and accumulator, and splits are
merged in ascending order. Whether one program walks all splits (prefill) or one program takes each split and a second
kernel merges them (decode) therefore changes no bit of a row: that is the deterministic mode.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.interpreter import correct_interpreter

correct_interpreter()

# How a program treats splits.
ONE_SPLIT = 0  # all positions are one split; nothing is merged
IN_ORDER = 1  # the program walks all splits and merges them in order
PARTIAL = 2  # the program takes the split of its third grid index and writes the partial result

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_sequence(query_start, num_seqs, block, BLOCK_Q: tl.constexpr):
    """The sequence that owns query block `block`: the last s with query_start[s] // BLOCK_Q + s ≤ block.

    Sequence s gets the blocks from query_start[s] // BLOCK_Q + s on, which are always enough for its tokens, so the
    grid depends on the numbers of tokens and sequences alone.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def merge_split(total_acc, total_max, total_sum, acc, row_max, row_sum):
    """Adds one split's partial result to the running total; an empty split changes no bit."""
    new_max = tl.maximum(total_max, row_max)
    safe = tl.where(new_max == float("-inf"), 0.0, new_max)
    keep = tl.exp2(total_max - safe)
    add = tl.exp2(row_max - safe)
    total_acc = tl.fma(total_acc, keep[:, None], acc * add[:, None])
    total_sum = tl.fma(total_sum, keep, row_sum * add)
    return total_acc, new_max, total_sum


@triton.jit
def normalise(acc, row_max, row_sum, sink, HAS_SINKS: tl.constexpr):
    """acc / (row_sum + 2^(sink − row_max)); rows without any key give 0. `sink` is in base-2 units."""
    if HAS_SINKS:
        new_max = tl.maximum(row_max, sink)
        keep = tl.exp2(row_max - new_max)
        acc = acc * keep[:, None]
        row_sum = tl.fma(row_sum, keep, tl.exp2(sink - new_max))
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    return acc / divisor[:, None]


@triton.jit
def paged_attention_kernel(
    out,
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    block_tables,
    query_start,
    context_lens,
    sinks,
    partial_acc,
    partial_max,
    partial_sum,
    num_seqs,
    scale,
    softcap,
    window,
    split_size,
    num_splits,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_table,
    stride_kv_block,
    stride_kv_head,
    stride_kv_slot,
    stride_scale_block,
    stride_scale_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid: (tokens // BLOCK_Q + sequences, KV heads, splits if SPLITS is PARTIAL else 1).

    BLOCK_Q = BLOCK_M // GROUP.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(query_start, num_seqs, block, BLOCK_Q)
    first_token = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - first_token
    context = tl.load(context_lens + seq)
    first_query = (block - (first_token // BLOCK_Q + seq)) * BLOCK_Q
    if first_query >= query_len:
        return
    if SPLITS == 2:
        first_split = tl.program_id(2)
        if first_split * split_size >= context:
            return

    rows = tl.arange(0, BLOCK_M)
    query = first_query + rows // GROUP
    q_head = kv_head * GROUP + rows % GROUP
    row_ok = (rows < BLOCK_Q * GROUP) & (query < query_len)
    token = first_token + query
    # Rows that do not exist stand at position −1 and see no key.
    position = tl.where(row_ok, context - query_len + query, -1)
    dims = tl.arange(0, HEAD_PAD)
    dim_ok = dims < HEAD_DIM
    q_offsets = token.to(tl.int64) * stride_q_token + q_head * stride_q_head
    q_tile = tl.load(q + q_offsets[:, None] + dims[None, :], mask=row_ok[:, None] & dim_ok[None, :], other=0.0)

    last_query = tl.minimum(first_query + BLOCK_Q, query_len) - 1
    limit = context - query_len + last_query + 1
    lowest = 0
    if HAS_WINDOW:
        lowest = tl.maximum(context - query_len + first_query - window + 1, 0)
    columns = tl.arange(0, BLOCK_N)
    table = block_tables + seq.to(tl.int64) * stride_table

    if SPLITS == 0:
        first_split = 0
        last_split = 1
    elif SPLITS == 1:
        first_split = lowest // split_size
        last_split = tl.cdiv(limit, split_size)
    else:
        last_split = first_split + 1

    total_acc = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
    total_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for split in range(first_split, last_split):
        if SPLITS == 0:
            begin = (lowest // BLOCK_N) * BLOCK_N
            end = limit
        else:
            begin = tl.maximum(split * split_size, (lowest // BLOCK_N) * BLOCK_N)
            end = tl.minimum(split * split_size + split_size, limit)
        acc = tl.zeros([BLOCK_M, HEAD_PAD], dtype=tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        for start in range(begin, end, BLOCK_N):
            key = start + columns
            key_ok = key < context
            page = tl.load(table + key // BLOCK_SIZE, mask=key_ok, other=0).to(tl.int64)
            slot = key % BLOCK_SIZE
            kv_offsets = page * stride_kv_block + kv_head * stride_kv_head + slot * stride_kv_slot
            k_tile = tl.load(
                k_cache + kv_offsets[None, :] + dims[:, None], mask=key_ok[None, :] & dim_ok[:, None], other=0.0
            )
            scores = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision="ieee") * scale
            if HAS_SCALES:
                scale_offsets = page * stride_scale_block + kv_head * stride_scale_head + slot
                scores = scores * tl.load(k_scale + scale_offsets, mask=key_ok, other=0.0)[None, :]
            if HAS_SOFTCAP:
                # tanh(x) = 1 − 2 / (e^2x + 1), right at both ends.
                scores = softcap * (1.0 - 2.0 / (tl.exp2(scores / softcap * (2.0 * LOG2_E)) + 1.0))
            visible = key_ok[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible = visible & (position[:, None] - key[None, :] < window)
            scores = tl.where(visible, scores * LOG2_E, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            safe = tl.where(new_max == float("-inf"), 0.0, new_max)
            keep = tl.exp2(row_max - safe)
            weights = tl.exp2(scores - safe[:, None])
            row_sum = row_sum * keep + tl.sum(weights, 1)
            row_max = new_max
            v_tile = tl.load(
                v_cache + kv_offsets[:, None] + dims[None, :], mask=key_ok[:, None] & dim_ok[None, :], other=0.0
            )
            if HAS_SCALES:
                weights = weights * tl.load(v_scale + scale_offsets, mask=key_ok, other=0.0)[None, :]
            acc = tl.dot(weights.to(q_tile.dtype), v_tile.to(q_tile.dtype), acc * keep[:, None], input_precision="ieee")
        if SPLITS == 1:
            total_acc, total_max, total_sum = merge_split(total_acc, total_max, total_sum, acc, row_max, row_sum)
        else:
            total_acc = acc
            total_max = row_max
            total_sum = row_sum

    if SPLITS == 2:
        index = (token.to(tl.int64) * (tl.num_programs(1) * GROUP) + q_head) * num_splits + first_split
        tl.store(partial_max + index, total_max, mask=row_ok)
        tl.store(partial_sum + index, total_sum, mask=row_ok)
        tl.store(partial_acc + index[:, None] * HEAD_PAD + dims[None, :], total_acc, mask=row_ok[:, None])
    else:
        sink = total_max
        if HAS_SINKS:
            sink = tl.load(sinks + q_head, mask=row_ok, other=0.0).to(tl.float32) * LOG2_E
        result = normalise(total_acc, total_max, total_sum, sink, HAS_SINKS)
        out_offsets = token.to(tl.int64) * stride_out_token + q_head * stride_out_head
        tl.store(
            out + out_offsets[:, None] + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=row_ok[:, None] & dim_ok[None, :],
        )


@triton.jit
def combine_splits_kernel(
    out,
    query_start,
    context_lens,
    sinks,
    partial_acc,
    partial_max,
    partial_sum,
    num_seqs,
    split_size,
    num_splits,
    stride_out_token,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merges the partial results of a row in ascending order of split. Grid: (tokens, query heads)."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    # The sequence of the token: the first whose end lies behind it.
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle + 1) <= token:
            low = middle + 1
        else:
            high = middle
    if low >= num_seqs:
        # A padding token behind the last sequence.
        return
    splits = tl.cdiv(tl.load(context_lens + low), split_size)
    dims = tl.arange(0, HEAD_PAD)
    row = tl.arange(0, 1)
    total_acc = tl.zeros([1, HEAD_PAD], dtype=tl.float32)
    total_max = tl.full([1], float("-inf"), dtype=tl.float32)
    total_sum = tl.zeros([1], dtype=tl.float32)
    base = (token.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    for split in range(splits):
        index = base + split + row
        acc = tl.load(partial_acc + index[:, None] * HEAD_PAD + dims[None, :])
        row_max = tl.load(partial_max + index)
        row_sum = tl.load(partial_sum + index)
        total_acc, total_max, total_sum = merge_split(total_acc, total_max, total_sum, acc, row_max, row_sum)
    sink = total_max
    if HAS_SINKS:
        sink = tl.load(sinks + head + row).to(tl.float32) * LOG2_E
    result = normalise(total_acc, total_max, total_sum, sink, HAS_SINKS)
    offsets = token.to(tl.int64) * stride_out_token + head * stride_out_head + dims
    tl.store(out + offsets[None, :] + row[:, None], result.to(out.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])
