"""Logits processing, sampling and verification in plain torch and numpy: dense, by sorting, row by row.

Noise comes in as numbers, so that this module needs no generator: a function gives the Gumbel value of a token id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Gumbel noise of all token ids of a row: vocabulary size → fp32 [V].
NoiseRow = Callable[[int], torch.Tensor]


def edit_row(
    logits: torch.Tensor,
    entries: Sequence[tuple[int, float, int]],
    repetition: float,
    frequency: float,
    presence: float,
) -> torch.Tensor:
    """Bias, then repetition, frequency and presence penalty, on one row [V].

    entries: (token id, bias, uses) with uses −1 = unseen, 0 = in the prompt only, n = written n times.
    """
    out = logits.clone()
    for token, bias, uses in entries:
        value = out[token] + bias
        if uses >= 0:
            value = value / repetition if value > 0 else value * repetition
        if uses > 0:
            value = value - frequency * uses - presence
        out[token] = value
    return out


def survivors(row: torch.Tensor, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    """Which tokens of a row [V] (logits over temperature) stay after min_p, then top-k, then top-p. bool [V].

    Ties go to the lowest ids; top-p keeps the token that crosses the mass, relative to what min_p and top-k left.
    """
    value = row.to(torch.float64)
    keep = value > float("-inf")
    if not bool(keep.any()):
        return keep
    if min_p > 0.0:
        keep &= value >= value.max() + torch.log(torch.tensor(min_p, dtype=torch.float64))
    order = torch.sort(torch.where(keep, value, float("-inf")), descending=True, stable=True).indices
    count = int(keep.sum())
    if 0 < top_k < count:
        count = top_k
    if top_p < 1.0:
        mass = torch.softmax(value[order[:count]], dim=0).cumsum(0)
        count = min(count, int((mass < top_p).sum()) + 1)
    kept = torch.zeros_like(keep)
    kept[order[:count]] = True
    return kept


def sample_row(
    logits: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float, noise: NoiseRow
) -> int:
    """The token sampled from one processed row [V]; ties go to the lowest id. −1: none is allowed, −2: NaN or +inf."""
    row = logits.to(torch.float32)
    if bool((torch.isnan(row) | (row == float("inf"))).any()):
        return -2
    if not bool((row > float("-inf")).any()):
        return -1
    if temperature == 0.0:
        return int(torch.argmax(row))
    row = row / temperature
    kept = survivors(row, min_p, top_k, top_p)
    return int(torch.argmax(torch.where(kept, row + noise(row.numel()), float("-inf"))))


def keep_while_equal(sampled: Sequence[int], drafts: Sequence[int]) -> int:
    """How many drafts are kept: sampled has one token per draft and one more."""
    kept = 0
    while kept < len(drafts) and drafts[kept] == sampled[kept]:
        kept += 1
    return kept


def residual(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """max(target − draft, 0), not normalised (Leviathan et al., arXiv 2211.17192).

    The target itself where that is 0.
    """
    difference = (target - draft).clamp_min(0.0)
    return difference if bool((difference > 0.0).any()) else target


def token_score(logits: torch.Tensor, token: int) -> tuple[float, int]:
    """Log-softmax (fp64) and rank from 1 of a token under a row of raw logits [V]; equal logits rank by id."""
    row = logits.to(torch.float64)
    order = torch.sort(row, descending=True, stable=True).indices
    return float(torch.log_softmax(row, dim=0)[token]), int((order == token).nonzero()) + 1
