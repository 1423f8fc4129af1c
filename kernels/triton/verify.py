"""Verification of drafts on the device: keep-while-equal, and rejection against the draft's own sparse distribution."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.interpreter import correct_interpreter
from kernels.triton.noise import philox_word, uniform_of_word
from kernels.triton.sampling import RowParams, draw
from kernels.triton.truncation import order_key, scaled_logits, survives, truncate

correct_interpreter()

# Purposes of noise, the last word of the counter, are as in tandem.lm.noise: 0 sample, 1 accept, 2 residual.
# Key of −inf as int32 bits: a threshold that keeps every allowed token.
KEEP_ALL = 0x007FFFFF


@triton.jit
def keep_while_equal_kernel(accepted, sampled, drafts, row_start, PAD: tl.constexpr):
    """Drafts kept per sequence: up to the first that differs from what its row sampled. Grid: (sequences,)."""
    seq = tl.program_id(0)
    begin = tl.load(row_start + seq)
    count = tl.load(row_start + seq + 1) - begin - 1
    lanes = tl.arange(0, PAD)
    inside = lanes < count
    draft = tl.load(drafts + begin + lanes, mask=inside, other=-1)
    token = tl.load(sampled + begin + lanes, mask=inside, other=-2)
    first_mismatch = tl.min(tl.where(inside & (draft == token), PAD, lanes), 0)
    tl.store(accepted + seq, tl.maximum(tl.minimum(first_mismatch, count), 0))


@triton.jit
def probability_kernel(
    logits, log_sums, temperatures, thresholds, last_ties, vocab, stride_logits, BLOCK: tl.constexpr
):
    """Scales rows by temperature, sets what truncation drops to −inf, in place, and stores each row's log-sum-exp.

    Temperature 0 becomes all mass on the argmax (lowest id). Grid: (rows,).
    """
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride_logits
    temperature = tl.load(temperatures + index)
    threshold = tl.load(thresholds + index).to(tl.uint32, bitcast=True)
    last_tie = tl.load(last_ties + index)
    row_max = tl.full([], float("-inf"), dtype=tl.float32)
    best = tl.full([], -1, dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = scaled_logits(row, columns, columns < vocab, temperature)
        block_max = tl.max(value, 0)
        if block_max > row_max:
            row_max = block_max
            best = tl.min(tl.where(value == block_max, columns, vocab), 0)
    total = tl.zeros([], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab
        value = scaled_logits(row, columns, inside, temperature)
        keep = inside & survives(order_key(value), columns, threshold, last_tie)
        keep = keep & (columns == tl.where(temperature > 0.0, columns, best))
        value = tl.where(keep, value, float("-inf"))
        total += tl.sum(tl.where(keep, tl.exp(value - row_max), 0.0), 0)
        tl.store(row + columns, value, mask=inside)
    tl.store(log_sums + index, row_max + tl.log(total))


@triton.jit
def accept_kernel(
    accepted,
    logits,
    log_sums,
    drafts,
    draft_tokens,
    draft_probabilities,
    row_start,
    seeds,
    positions,
    choices,
    stride_logits,
    stride_draft,
    WIDTH: tl.constexpr,
):
    """Accepts drafts while u · q(d) < p(d); u is keyed by position and draft token. Grid: (sequences,)."""
    seq = tl.program_id(0)
    begin = tl.load(row_start + seq)
    count = tl.load(row_start + seq + 1) - begin - 1
    lanes = tl.arange(0, WIDTH)
    kept = 0
    going = count > 0
    while going:
        index = begin + kept
        draft = tl.load(drafts + index)
        tokens = tl.load(draft_tokens + index.to(tl.int64) * stride_draft + lanes)
        masses = tl.load(draft_probabilities + index.to(tl.int64) * stride_draft + lanes)
        q = tl.sum(tl.where(tokens == draft, masses, 0.0), 0)
        p = tl.exp(tl.load(logits + index.to(tl.int64) * stride_logits + draft) - tl.load(log_sums + index))
        word = philox_word(tl.load(seeds + index), tl.load(positions + index), draft, tl.load(choices + index), 1)
        # A draft that its own distribution cannot have given is never kept.
        going = (q > 0.0) & (uniform_of_word(word) * q < p)
        if going:
            kept += 1
            going = kept < count
    tl.store(accepted + seq, kept)


@triton.jit
def residual_kernel(
    logits,
    final_rows,
    purposes,
    log_sums,
    accepted,
    drafts,
    draft_tokens,
    draft_probabilities,
    row_start,
    stride_logits,
    stride_draft,
    WIDTH: tl.constexpr,
):
    """Turns the first rejected row into the logits of max(p − q, 0), in place, if anything is left of it; stores the
    sequence's final row. Grid: (sequences,)."""
    seq = tl.program_id(0)
    begin = tl.load(row_start + seq)
    count = tl.load(row_start + seq + 1) - begin - 1
    kept = tl.load(accepted + seq)
    index = begin + kept
    tl.store(final_rows + seq, index)
    tl.store(purposes + seq, 0)
    if kept < count:
        lanes = tl.arange(0, WIDTH)
        log_sum = tl.load(log_sums + index)
        tokens = tl.load(draft_tokens + index.to(tl.int64) * stride_draft + lanes)
        masses = tl.load(draft_probabilities + index.to(tl.int64) * stride_draft + lanes)
        inside = tokens >= 0
        row = logits + index.to(tl.int64) * stride_logits
        value = tl.load(row + tokens, mask=inside, other=float("-inf"))
        p = tl.exp(value - log_sum)
        left = tl.where(inside, tl.maximum(p - masses, 0.0), 0.0)
        # Tokens outside the draft's list keep all of p. Where nothing is left (rounding), or the draft is not from its
        # distribution, the row is sampled as without drafts.
        outside = 1.0 - tl.sum(tl.where(inside, p, 0.0), 0)
        own = tl.sum(tl.where(inside & (tokens == tl.load(drafts + index)), masses, 0.0), 0)
        if (own > 0.0) & ((tl.sum(left, 0) > 0.0) | (outside > 1e-6)):
            tl.store(purposes + seq, 2)
            edited = tl.where(left > 0.0, tl.log(tl.maximum(left, 1e-45)) + log_sum, float("-inf"))
            tl.store(row + tokens, edited, mask=inside)


def keep_while_equal(
    sampled: torch.Tensor, drafts: torch.Tensor, row_start: torch.Tensor, max_rows: int
) -> torch.Tensor:
    """Drafts kept per sequence, int32 [S].

    sampled: int32 [R], what each row sampled; drafts: int32 [R], drafts[r] is the draft after row r (a sequence's last
    row has none, its entry is not read); row_start: int32 [S + 1]; max_rows bounds the rows of a sequence.
    """
    sequences = row_start.numel() - 1
    accepted = torch.empty(sequences, dtype=torch.int32, device=sampled.device)
    if sequences:
        pad = triton.next_power_of_2(max(max_rows, 1))
        keep_while_equal_kernel[(sequences,)](accepted, sampled, drafts, row_start, PAD=pad, num_warps=1)
    return accepted


def rejection_sample(
    logits: torch.Tensor,
    params: RowParams,
    drafts: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probabilities: torch.Tensor,
    row_start: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192) against sparse draft distributions.

    logits: processed fp32 [R, V], overwritten; params per row, purposes are not read; drafts: int32 [R]; draft_tokens:
    int32 [R, W] padded with −1 and draft_probabilities: fp32 [R, W], W a power of two; row_start: int32 [S + 1].
    Returns (accepted int32 [S], token int32 [S]): the token after the accepted drafts, from the residual after a
    rejection, else (also for a draft that its distribution does not name) from the target. Raises ValueError for
    other shapes.
    """
    width = draft_tokens.shape[1]
    if width & (width - 1) or draft_probabilities.shape != draft_tokens.shape or logits.dtype != torch.float32:
        raise ValueError(f"draft lists {tuple(draft_tokens.shape)} must be a power of two wide, logits fp32")
    rows, vocab = logits.shape
    sequences = row_start.numel() - 1
    accepted = torch.empty(sequences, dtype=torch.int32, device=logits.device)
    final_rows, purposes = torch.empty_like(accepted), torch.empty_like(accepted)
    if rows == 0 or sequences == 0:
        return accepted.zero_(), final_rows.fill_(-1)
    thresholds, last_ties = truncate(logits, params.temperatures, params.min_ps, params.top_ks, params.top_ps)
    log_sums = torch.empty(rows, dtype=torch.float32, device=logits.device)
    probability_kernel[(rows,)](
        logits, log_sums, params.temperatures, thresholds, last_ties, vocab, logits.stride(0), BLOCK=1024
    )
    accept_kernel[(sequences,)](
        accepted,
        logits,
        log_sums,
        drafts,
        draft_tokens,
        draft_probabilities,
        row_start,
        params.seeds,
        params.positions,
        params.choices,
        logits.stride(0),
        draft_tokens.stride(0),
        WIDTH=width,
        num_warps=1,
    )
    residual_kernel[(sequences,)](
        logits,
        final_rows,
        purposes,
        log_sums,
        accepted,
        drafts,
        draft_tokens,
        draft_probabilities,
        row_start,
        logits.stride(0),
        draft_tokens.stride(0),
        WIDTH=width,
        num_warps=1,
    )
    rows_of = final_rows.long()
    ones = torch.ones(sequences, dtype=torch.float32, device=logits.device)
    final = RowParams(
        temperatures=ones,
        min_ps=ones,
        top_ks=accepted,
        top_ps=ones,
        seeds=params.seeds[rows_of],
        positions=params.positions[rows_of],
        choices=params.choices[rows_of],
        purposes=purposes,
    )
    keep_all = torch.full((sequences,), KEEP_ALL, dtype=torch.int32, device=logits.device)
    none = torch.full_like(keep_all, -1)
    return accepted, draw(logits[rows_of], final, keep_all, none)
