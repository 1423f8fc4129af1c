"""min_p, top-k and top-p: which ids of a row survive. Vectorised over rows, without a full-vocabulary sort."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.lm.scores import ordered_top

# Candidates looked at first for top-p; four times as many when they do not hold enough mass.
_FIRST = 256


@dataclass(frozen=True)
class Survivors:
    """Flat arrays over all rows, grouped by row in ascending order: row, token id and processed logit (fp32)."""

    rows: np.ndarray
    ids: np.ndarray
    logits: np.ndarray


def truncate(logits: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> Survivors:
    """Survivors of logits fp32 [rows, vocab], already divided by temperature.

    Each filter works on what the one before left, renormalised: min_p keeps ids with at least min_p of the greatest
    probability, top-k the k greatest (ties by lowest id; 0: all), top-p the shortest head that holds top_p (1: all).
    """
    vocab = logits.shape[1]
    peak = logits.max(axis=1)
    with np.errstate(divide="ignore"):
        floor = peak + np.log(min_p.astype(np.float32))
    limit = np.where(top_k > 0, np.minimum(top_k, vocab), vocab)
    mass = _kept_mass(logits, peak, floor, limit, top_p)
    wanted = np.where(limit < vocab, limit, min(_FIRST, vocab))
    width = int(wanted.max())
    while True:
        ids, values = _heads(logits, width)
        keep, complete = _filter(values, peak, floor, limit, top_p, mass, vocab)
        if complete or width >= vocab:
            break
        width = min(vocab, width * 4)
    where, column = np.nonzero(keep)
    return Survivors(where, ids[where, column], values[where, column])


def _heads(logits: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values [rows, width] of each row's greatest, ordered by value, ties by lowest id."""
    import torch

    vocab = logits.shape[1]
    if width >= vocab:
        order = np.lexsort((np.broadcast_to(np.arange(vocab), logits.shape), -logits), axis=1)
        return order, np.take_along_axis(logits, order, axis=1)
    # One more than asked shows whether ties reach beyond the edge.
    found, places = torch.from_numpy(logits).topk(width + 1, dim=1)
    values, ids = found.numpy(), places.numpy()
    order = np.lexsort((ids, -values), axis=1)
    ids, values = np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)
    for row in np.flatnonzero(values[:, width - 1] == values[:, width]):
        # topk cuts ties anyhow; these rows are rare and are cut by id.
        ids[row, :width] = ordered_top(logits[row], width)
    return ids[:, :width], values[:, :width]


def _kept_mass(
    logits: np.ndarray, peak: np.ndarray, floor: np.ndarray, limit: np.ndarray, top_p: np.ndarray
) -> np.ndarray:
    """Sum of exp(logit - peak) over what min_p keeps, fp32 [rows]; only where top-p follows no top-k."""
    mass = np.zeros(len(logits), dtype=np.float32)
    need = np.flatnonzero((top_p < 1.0) & (limit == logits.shape[1]))
    if len(need):
        part = logits[need]
        weights = np.where(part >= floor[need, None], np.exp(part - peak[need, None]), np.float32(0))
        mass[need] = weights.sum(axis=1, dtype=np.float32)
    return mass


def _filter(
    values: np.ndarray,
    peak: np.ndarray,
    floor: np.ndarray,
    limit: np.ndarray,
    top_p: np.ndarray,
    mass: np.ndarray,
    vocab: int,
) -> tuple[np.ndarray, bool]:
    """Which of the ordered heads survive [rows, width], and whether the heads were long enough to know."""
    width = values.shape[1]
    keep = (values >= floor[:, None]) & (values > -np.inf) & (np.arange(width)[None, :] < limit[:, None])
    weights = np.where(keep, np.exp(values - peak[:, None]), np.float32(0)).astype(np.float64)
    # Cumulated along a row, one element after another: the width does not change a sum's bits.
    cumulated = np.cumsum(weights, axis=1)
    total = np.where(limit < vocab, cumulated[:, -1], mass.astype(np.float64))
    before = cumulated - weights
    target = top_p.astype(np.float64) * total
    nucleus = (top_p < 1.0)[:, None]
    inside = np.where(nucleus, before < target[:, None], True)
    inside[:, 0] = True
    # Long enough: every survivor was seen, that is the last one looked at is out, or nothing comes after it.
    ended = (limit <= width) | ~keep[:, -1] | ((top_p < 1.0) & (cumulated[:, -1] >= target))
    return keep & inside, bool(ended.all())
