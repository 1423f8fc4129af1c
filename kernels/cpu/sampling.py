"""Sampling and scoring rows of logits natively: no full-vocabulary sort, noise only where it can matter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.cpu import library

# What a row yields instead of an id.
NO_ALLOWED_TOKEN = -1
NOT_A_NUMBER = -2

# TdSample as a record, so that a batch of rows is one array.
SAMPLE = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("top_k", "<i4"),
        ("seed", "<u8"),
        ("position", "<i4"),
        ("choice", "<i4"),
        ("purpose", "<i4"),
        ("reserved", "<i4"),
    ]
)


@dataclass(frozen=True)
class Scores:
    """Log-softmax of raw logits at one id per row, and the most likely ids [rows, width], -1 where fewer were asked."""

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def _rows(logits: np.ndarray) -> tuple[int, int, int]:
    if logits.dtype != np.float32 or logits.ndim != 2 or (logits.shape[1] > 1 and logits.strides[1] != 4):
        raise ValueError(f"logits must be fp32 [rows, vocab] with contiguous rows, got {logits.dtype} {logits.shape}")
    return logits.shape[0], logits.shape[1], logits.strides[0] // 4


def sample(logits: np.ndarray, params: np.ndarray) -> np.ndarray:
    """One id per row of processed logits fp32 [rows, vocab]: int32 [rows].

    params: SAMPLE records, one per row: temperature (0: greedy), min_p, top_k (0: off), top_p (1: off), and the noise's
    key and counter. A row with nothing allowed yields NO_ALLOWED_TOKEN, one with NaN or +inf NOT_A_NUMBER.
    """
    rows, vocab, stride = _rows(logits)
    if params.dtype != SAMPLE or params.shape != (rows,) or not params.flags.c_contiguous:
        raise ValueError(f"params must be {rows} contiguous SAMPLE records, got {params.dtype} {params.shape}")
    ids = np.empty(rows, np.int32)
    library().td_sample(logits.ctypes.data, stride, vocab, rows, params.ctypes.data, ids.ctypes.data)
    return ids


def score(logits: np.ndarray, rows: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> Scores:
    """Scores of ids int32 [n] at rows int32 [n] of raw logits; counts int32 [n]: most likely ids that each reports."""
    total, vocab, stride = _rows(logits)
    n = len(ids)
    for name, array in (("rows", rows), ("ids", ids), ("counts", counts)):
        if array.dtype != np.int32 or array.shape != (n,) or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be contiguous int32 [{n}], got {array.dtype} {array.shape}")
    if n and (rows.min() < 0 or rows.max() >= total or ids.min() < 0 or ids.max() >= vocab):
        raise ValueError(f"rows must be below {total} and ids below {vocab}")
    width = max(1, int(counts.max(initial=0)))
    result = Scores(
        np.empty(n, np.float32),
        np.empty(n, np.int32),
        np.full((n, width), -1, np.int32),
        np.full((n, width), -np.inf, np.float32),
    )
    if n:
        library().td_score(
            logits.ctypes.data, stride, vocab, n, rows.ctypes.data, ids.ctypes.data, counts.ctypes.data, width,
            result.logprobs.ctypes.data, result.ranks.ctypes.data, result.top_ids.ctypes.data,
            result.top_logprobs.ctypes.data,
        )  # fmt: skip
    return result
