"""Log-softmax of raw logits: scores of sampled and prompt tokens."""

from __future__ import annotations

import numpy as np

from tandem.lm.types import TokenScore


def log_normalizers(logits: np.ndarray) -> np.ndarray:
    """log Σ exp per row of fp32 [rows, vocab], fp64 [rows]. Rows are reduced one by one in a fixed order."""
    peak = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - peak).sum(axis=1, dtype=np.float32)
    return np.log(total.astype(np.float64)) + peak[:, 0].astype(np.float64)


def ordered_top(row: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` greatest values of one row, by value, ties by lowest id. No full sort."""
    count = min(count, len(row))
    if count == len(row):
        return np.lexsort((np.arange(len(row)), -row))
    threshold = np.partition(row, len(row) - count)[len(row) - count]
    # All ids at the threshold take part, so that ties are cut by id.
    ids = np.flatnonzero(row >= threshold)
    return ids[np.lexsort((ids, -row[ids]))][:count]


def token_scores(logits: np.ndarray, ids: list[int], alternatives: list[int]) -> list[TokenScore]:
    """Score of one id per row, with its rank and the row's most likely ids.

    logits: raw fp32 [rows, vocab]; alternatives: how many top ids each row reports.
    """
    normalizers = log_normalizers(logits)
    picked = logits[np.arange(len(ids)), ids]
    ranks = (logits > picked[:, None]).sum(axis=1) + 1
    logprobs = (picked - normalizers).astype(np.float32)
    scores = []
    for row, (token, count) in enumerate(zip(ids, alternatives, strict=True)):
        top = ordered_top(logits[row], count) if count else np.empty(0, dtype=np.int64)
        top_logprobs = (logits[row, top] - normalizers[row]).astype(np.float32)
        scores.append(
            TokenScore(
                id=int(token),
                logprob=float(logprobs[row]),
                rank=int(ranks[row]),
                top_ids=tuple(top.tolist()),
                top_logprobs=tuple(top_logprobs.tolist()),
            )
        )
    return scores
