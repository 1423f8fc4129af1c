"""Which tokens of a row survive min_p, top-k and top-p: a threshold per row, found without a sort.

Logits become unsigned keys that order like the floats. The k-th largest key, or the key at which the mass reaches
top_p, is found by eight passes of a 16-way search, four bits each; what is summed (ones or probabilities) is the only
difference. A row's survivors are the keys above its threshold, and those equal to it up to a token id: ties go to the
lowest ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.interpreter import correct_interpreter

correct_interpreter()

# Columns of one pass.
BLOCK = 1024


@triton.jit
def scaled_logits(row, columns, inside, temperature):
    """Logits over temperature (not scaled where it is 0), fp32; NaN and columns outside count as −inf."""
    value = tl.load(row + columns, mask=inside, other=float("-inf")).to(tl.float32)
    value = value / tl.where(temperature > 0.0, temperature, 1.0)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def order_key(value):
    """uint32 keys that order like the fp32 values; −0 equals +0."""
    bits = (value + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def survives(key, columns, threshold, last_tie):
    """Whether keys stay: above the threshold, or equal to it with a token id up to last_tie."""
    return (key > threshold) | ((key == threshold) & (columns <= last_tie))


@triton.jit
def find_threshold(
    row, vocab, temperature, row_max, floor_key, floor_tie, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """(threshold, last_tie) such that survivors of (floor_key, floor_tie) sum up to `target`, largest first.

    BY_MASS sums exp(logit − row_max), otherwise ones. The sum includes the token that crosses the target.
    """
    lanes = tl.arange(0, 16)
    threshold = tl.zeros([], dtype=tl.uint32)
    shift = 28
    while shift >= 0:
        candidates = threshold + (lanes.to(tl.uint32) << shift)
        sums = tl.zeros([16], dtype=tl.float32)
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            value = scaled_logits(row, columns, columns < vocab, temperature)
            key = order_key(value)
            weight = tl.exp(value - row_max) if BY_MASS else tl.full([BLOCK], 1.0, dtype=tl.float32)
            weight = tl.where((columns < vocab) & survives(key, columns, floor_key, floor_tie), weight, 0.0)
            sums += tl.sum(tl.where(key[:, None] >= candidates[None, :], weight[:, None], 0.0), 0)
        best = tl.max(tl.where((sums >= target) | (lanes == 0), lanes, 0), 0)
        threshold = threshold + (best.to(tl.uint32) << shift)
        shift -= 4
    # What lies above the threshold, and how many tokens lie on it.
    above = 0.0
    ties = 0
    tie_weight = 0.0
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = scaled_logits(row, columns, columns < vocab, temperature)
        key = order_key(value)
        weight = tl.exp(value - row_max) if BY_MASS else tl.full([BLOCK], 1.0, dtype=tl.float32)
        alive = (columns < vocab) & survives(key, columns, floor_key, floor_tie)
        above += tl.sum(tl.where(alive & (key > threshold), weight, 0.0), 0)
        tied = alive & (key == threshold)
        ties += tl.sum(tied.to(tl.int32), 0)
        tie_weight = tl.maximum(tie_weight, tl.max(tl.where(tied, weight, 0.0), 0))
    wanted = tl.ceil((target - above) / tl.maximum(tie_weight, 1e-38)).to(tl.int32)
    wanted = tl.minimum(tl.maximum(wanted, 1), ties)
    last_tie = vocab
    if wanted < ties:
        seen = 0
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            key = order_key(scaled_logits(row, columns, columns < vocab, temperature))
            tied = (columns < vocab) & (key == threshold) & survives(key, columns, floor_key, floor_tie)
            rank = seen + tl.cumsum(tied.to(tl.int32), 0)
            last_tie = tl.minimum(last_tie, tl.min(tl.where(tied & (rank == wanted), columns, vocab), 0))
            seen += tl.sum(tied.to(tl.int32), 0)
    return threshold, last_tie


@triton.jit
def truncation_kernel(
    thresholds,
    last_ties,
    logits,
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    vocab,
    stride_logits,
    BLOCK: tl.constexpr,
):
    """Threshold and last tie of each row, for min_p, then top-k, then top-p. Grid: (rows,)."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride_logits
    temperature = tl.load(temperatures + index)
    min_p = tl.load(min_ps + index)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index)
    # Key of −inf: a row without truncation keeps whatever lies above it.
    threshold = tl.full([], 0x007FFFFF, dtype=tl.uint32)
    last_tie = tl.full([], -1, dtype=tl.int32)
    truncates = (min_p > 0.0) | ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)
    if truncates & (temperature > 0.0):
        row_max = tl.full([], float("-inf"), dtype=tl.float32)
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            row_max = tl.maximum(row_max, tl.max(scaled_logits(row, columns, columns < vocab, temperature), 0))
        if row_max > float("-inf"):
            if min_p > 0.0:
                threshold = order_key(row_max + tl.log(min_p))
                last_tie = vocab
            alive = 0
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                key = order_key(scaled_logits(row, columns, columns < vocab, temperature))
                alive += tl.sum(((columns < vocab) & survives(key, columns, threshold, last_tie)).to(tl.int32), 0)
            if (top_k > 0) & (top_k < alive):
                threshold, last_tie = find_threshold(
                    row, vocab, temperature, row_max, threshold, last_tie, top_k.to(tl.float32), False, BLOCK
                )
            if top_p < 1.0:
                total = 0.0
                for start in range(0, vocab, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    value = scaled_logits(row, columns, columns < vocab, temperature)
                    keep = (columns < vocab) & survives(order_key(value), columns, threshold, last_tie)
                    total += tl.sum(tl.where(keep, tl.exp(value - row_max), 0.0), 0)
                threshold, last_tie = find_threshold(
                    row, vocab, temperature, row_max, threshold, last_tie, top_p * total, True, BLOCK
                )
    tl.store(thresholds + index, threshold.to(tl.int32, bitcast=True))
    tl.store(last_ties + index, last_tie)


def truncate(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    min_ps: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The truncation of each row of logits [R, V]: (thresholds as int32 bits of uint32 keys [R], last_ties int32 [R]).

    temperatures, min_ps, top_ps: fp32 [R]; top_ks: int32 [R], 0 = all. Rows with temperature 0 are not truncated.
    """
    rows, vocab = logits.shape
    thresholds = torch.empty(rows, dtype=torch.int32, device=logits.device)
    last_ties = torch.empty_like(thresholds)
    if rows:
        truncation_kernel[(rows,)](
            thresholds,
            last_ties,
            logits,
            temperatures,
            min_ps,
            top_ks,
            top_ps,
            vocab,
            logits.stride(0),
            BLOCK=BLOCK,
            num_warps=8,
        )
    return thresholds, last_ties
