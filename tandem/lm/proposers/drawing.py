"""Drafts for verification by rejection: drawn from a sparse distribution, with noise that verification never uses."""

from __future__ import annotations

import numpy as np

from tandem.lm import noise
from tandem.lm.proposers.base import Distribution

# Ids in a distribution.
TOP = 32


def draw(
    ids: np.ndarray,
    logits: np.ndarray,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    choice: int,
    position: int,
) -> tuple[int, float, Distribution]:
    """A draft drawn from the truncated, renormalised distribution over some ids; its chance; that distribution.

    ids int64, logits (or log-probabilities) fp64, both [n]; position: output position of the draft.
    """
    order = np.argsort(-logits, kind="stable")
    ids, scaled = ids[order], logits[order] / max(temperature, 1e-3)
    chances = np.exp(scaled - scaled[0])
    keep = chances >= max(min_p, 1e-6)
    if top_k:
        keep[top_k:] = False
    mass = np.cumsum(chances) / chances.sum()
    keep[1:] &= mass[:-1] < top_p
    ids, chances = ids[keep], chances[keep] / chances[keep].sum()
    gumbel = noise.gumbel(seed, position, ids, choice, noise.Purpose.DRAFT)
    best = int(np.argmax(np.log(chances) + gumbel))
    return int(ids[best]), float(chances[best]), (tuple(ids.tolist()), tuple(chances.tolist()))
