"""Logits processing and sampling on the device: sparse edits, allowed-token masks, Gumbel sampling, log-
probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.interpreter import correct_interpreter
from kernels.triton.noise import gumbel_noise
from kernels.triton.truncation import order_key, scaled_logits, survives, truncate

correct_interpreter()

# Columns of one program of the sampling pass, and entries of one pass over a row's edits.
SAMPLE_CHUNK = 2048
EDIT_BLOCK = 256
# No Gumbel value is larger: u ≤ 1 − 2⁻²⁴.
GUMBEL_MAX = tl.constexpr(16.7)


@dataclass(frozen=True, slots=True)
class RowParams:
    """Sampling parameters of each row, on the device. fp32 [R] unless said.

    top_ks, positions (output position of the sampled token), choices, purposes: int32; seeds: int64 with the seed's
    bits.
    """

    temperatures: torch.Tensor
    min_ps: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor
    purposes: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Sparse edits of rows: entries offsets[r] : offsets[r + 1] belong to row r, each token at most once per row.

    offsets: int32 [R + 1]; tokens: int32 [E]; biases: fp32 [E] (−inf bans the token); uses: int32 [E]: −1 the token was
    not seen, 0 it is in the prompt only, n it was written n times; repetition, frequency, presence: fp32 [R].
    """

    offsets: torch.Tensor
    tokens: torch.Tensor
    biases: torch.Tensor
    uses: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@triton.jit
def edit_kernel(
    logits, offsets, tokens, biases, uses, repetition, frequency, presence, stride_logits, BLOCK: tl.constexpr
):
    """Bias first, then repetition, frequency and presence penalty, at each row's entries. Grid: (rows,)."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride_logits
    begin = tl.load(offsets + index)
    end = tl.load(offsets + index + 1)
    if begin < end:
        repeat = tl.load(repetition + index)
        per_use = tl.load(frequency + index)
        once = tl.load(presence + index)
        for start in range(begin, end, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            inside = entry < end
            token = tl.load(tokens + entry, mask=inside, other=0)
            use = tl.load(uses + entry, mask=inside, other=-1)
            value = tl.load(row + token, mask=inside, other=0.0).to(tl.float32)
            value += tl.load(biases + entry, mask=inside, other=0.0)
            penalised = tl.where(value > 0.0, value / repeat, value * repeat)
            value = tl.where(use >= 0, penalised, value)
            value -= tl.where(use > 0, per_use * use.to(tl.float32) + once, 0.0)
            tl.store(row + token, value.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def mask_kernel(logits, masks, mask_rows, vocab, stride_logits, stride_masks, BLOCK: tl.constexpr):
    """−inf where the row's mask has no bit. Grid: (rows, vocab / BLOCK); mask_rows < 0: the row has no mask."""
    index = tl.program_id(0)
    mask_row = tl.load(mask_rows + index)
    if mask_row >= 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab
        words = tl.load(masks + mask_row.to(tl.int64) * stride_masks + columns // 32, mask=inside, other=-1)
        refused = ((words >> (columns % 32)) & 1) == 0
        target = logits + index.to(tl.int64) * stride_logits + columns
        tl.store(target, tl.full([BLOCK], float("-inf"), tl.float32).to(logits.dtype.element_ty), mask=inside & refused)


@triton.jit
def sample_kernel(
    best_values,
    best_tokens,
    logits,
    temperatures,
    thresholds,
    last_ties,
    seeds,
    positions,
    choices,
    purposes,
    vocab,
    stride_logits,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Best token of one chunk of one row, with noise unless temperature is 0; ties to the lowest id.

    Grid: (rows, chunks).
    """
    index = tl.program_id(0)
    chunk = tl.program_id(1)
    row = logits + index.to(tl.int64) * stride_logits
    temperature = tl.load(temperatures + index)
    threshold = tl.load(thresholds + index).to(tl.uint32, bitcast=True)
    last_tie = tl.load(last_ties + index)
    seed = tl.load(seeds + index)
    position = tl.load(positions + index)
    choice = tl.load(choices + index)
    purpose = tl.load(purposes + index)
    best_value = tl.full([], float("-inf"), dtype=tl.float32)
    best_token = tl.full([], -1, dtype=tl.int32)
    broken = tl.full([], 0, dtype=tl.int32)
    end = tl.minimum(vocab, (chunk + 1) * CHUNK)
    for start in range(chunk * CHUNK, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < end
        raw = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
        broken += tl.sum(((raw != raw) | (raw == float("inf"))).to(tl.int32), 0)
        value = scaled_logits(row, columns, inside, temperature)
        keep = inside & survives(order_key(value), columns, threshold, last_tie)
        value = tl.where(keep, value, float("-inf"))
        # No noise can lift a block that lies too far below the best so far.
        if tl.max(value, 0) > best_value - GUMBEL_MAX:
            if temperature > 0.0:
                value = tl.where(keep, value + gumbel_noise(seed, position, columns, choice, purpose), float("-inf"))
            block_best = tl.max(value, 0)
            if block_best > best_value:
                best_value = block_best
                best_token = tl.min(tl.where(value == block_best, columns, vocab), 0)
    tl.store(best_values + index * chunks + chunk, best_value)
    tl.store(best_tokens + index * chunks + chunk, tl.where(broken > 0, -2, best_token))


@triton.jit
def best_chunk_kernel(sampled, best_values, best_tokens, chunks, PAD: tl.constexpr):
    """The best token over a row's chunks, −1 if every token is refused, −2 if a logit is NaN or +inf. Grid: (rows,)."""
    index = tl.program_id(0)
    lanes = tl.arange(0, PAD)
    values = tl.load(best_values + index * chunks + lanes, mask=lanes < chunks, other=float("-inf"))
    tokens = tl.load(best_tokens + index * chunks + lanes, mask=lanes < chunks, other=-1)
    best = tl.max(values, 0)
    winner = tl.min(tl.where((values == best) & (tokens >= 0), tokens, 2147483647), 0)
    winner = tl.where(best > float("-inf"), winner, -1)
    tl.store(sampled + index, tl.where(tl.min(tokens, 0) == -2, -2, winner))


@triton.jit
def score_kernel(logprobs, ranks, logits, tokens, vocab, stride_logits, BLOCK: tl.constexpr):
    """Log-softmax and rank (from 1) of one token per row. Grid: (rows,)."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride_logits
    token = tl.load(tokens + index)
    chosen = tl.load(row + token).to(tl.float32)
    row_max = tl.full([], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([], dtype=tl.float32)
    above = tl.zeros([], dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        value = tl.load(row + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(value, 0))
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(value - new_max), 0)
        row_max = new_max
        above += tl.sum(((value > chosen) | ((value == chosen) & (columns < token))).to(tl.int32), 0)
    tl.store(logprobs + index, chosen - row_max - tl.log(row_sum))
    tl.store(ranks + index, above + 1)


def edit_logits(logits: torch.Tensor, edits: LogitEdits) -> None:
    """Applies sparse edits to logits [R, V] in place."""
    if logits.shape[0] and edits.tokens.numel():
        edit_kernel[(logits.shape[0],)](
            logits,
            edits.offsets,
            edits.tokens,
            edits.biases,
            edits.uses,
            edits.repetition,
            edits.frequency,
            edits.presence,
            logits.stride(0),
            BLOCK=EDIT_BLOCK,
        )


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, mask_rows: torch.Tensor) -> None:
    """Sets refused tokens of logits [R, V] to −inf in place.

    masks: int32 [n, ceil(V / 32)], bit = allowed, lowest id in the lowest bit; mask_rows: int32 [R], −1 = no mask.
    """
    rows, vocab = logits.shape
    if masks.shape[1] < triton.cdiv(vocab, 32):
        raise ValueError(f"masks of {masks.shape[1]} words do not cover a vocabulary of {vocab}")
    if rows:
        mask_kernel[(rows, triton.cdiv(vocab, 1024))](
            logits, masks, mask_rows, vocab, logits.stride(0), masks.stride(0), BLOCK=1024
        )


def draw(logits: torch.Tensor, params: RowParams, thresholds: torch.Tensor, last_ties: torch.Tensor) -> torch.Tensor:
    """Samples each row of processed logits under a known truncation; int32 [R], errors as in sample()."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, SAMPLE_CHUNK)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    sampled = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return sampled
    sample_kernel[(rows, chunks)](
        values,
        tokens,
        logits,
        params.temperatures,
        thresholds,
        last_ties,
        params.seeds,
        params.positions,
        params.choices,
        params.purposes,
        vocab,
        logits.stride(0),
        chunks,
        CHUNK=SAMPLE_CHUNK,
        BLOCK=512,
    )
    best_chunk_kernel[(rows,)](sampled, values, tokens, chunks, PAD=triton.next_power_of_2(chunks))
    return sampled


def sample(logits: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Temperature, min_p, top-k, top-p, Gumbel noise, argmax over processed logits [R, V] (fp32, rows contiguous).

    Temperature 0 takes the argmax. Returns int32 [R]; −1 for a row without an allowed token, −2 for one with NaN or
    +inf.
    """
    thresholds, last_ties = truncate(logits, params.temperatures, params.min_ps, params.top_ks, params.top_ps)
    return draw(logits, params, thresholds, last_ties)


def token_scores(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-softmax (fp32 [R]) and rank from 1 (int32 [R]) of tokens [R] under raw logits [R, V].

    Equal logits rank by id.
    """
    rows, vocab = logits.shape
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        score_kernel[(rows,)](logprobs, ranks, logits, tokens, vocab, logits.stride(0), BLOCK=1024)
    return logprobs, ranks
