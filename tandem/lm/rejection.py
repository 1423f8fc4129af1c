"""Verification by rejection: the output has exactly the target's distribution, whatever the draft's.

Leviathan et al. 2023 and Chen et al. 2023: draft d of distribution q is kept with probability min(1, p(d) / q(d)); the
first one that is not kept is replaced by a draw from max(p - q, 0), renormalised; if all are kept, one more is drawn
from p. Here p is the target after all sampling parameters. Acceptance, replacement and draft use noise of different
purposes: with shared noise they would depend on each other, and the result would be wrong.
"""

from __future__ import annotations

import numpy as np

from tandem.lm import noise
from tandem.lm.noise import Purpose
from tandem.lm.processors import Row
from tandem.lm.sampler import Sampler, survivors, temper
from tandem.lm.types import Slice, SliceOutput

Distribution = tuple[np.ndarray, np.ndarray]


def verify(sampler: Sampler, logits: np.ndarray, item: Slice, rows: list[Row], output: SliceOutput) -> None:
    """Fills `output` for a slice with distributions; logits: raw fp32 [1 + drafts, vocab].

    Raises:
        ValueError: not one distribution per draft, or one that is no distribution.
    """
    distributions = item.distributions or ()
    if len(distributions) != len(item.drafts):
        raise ValueError(
            f"sequence {item.sequence.id}: {len(item.drafts)} drafts, but {len(distributions)} distributions"
        )
    for step, row in enumerate(rows):
        processed = sampler.process(logits[step : step + 1], [row])
        draft = item.drafts[step] if step < len(item.drafts) else None
        if draft is None or row.params.greedy or not np.isfinite(processed.max()):
            # The row after the last draft, an argmax, or a row without an answer: the ordinary sampler's.
            if _ordinary(sampler, logits, step, row, output) != draft:
                return
            output.accepted += 1
            continue
        target, proposal = _target(processed[0], row), _checked(distributions[step], item.sequence.id)
        kept, token = _judge(row, target, draft, proposal)
        if token is None:
            _ordinary(sampler, logits, step, row, output)
            return
        output.token_ids.append(token)
        if not kept:
            return
        output.accepted += 1


def _ordinary(sampler: Sampler, logits: np.ndarray, step: int, row: Row, output: SliceOutput) -> int:
    """Samples one row as without drafts, into `output`; the id, or -1 after an error."""
    found = sampler.sample(logits[step : step + 1], [row])
    if error := found.errors.get(0):
        output.error = error
        return -1
    output.token_ids.append(int(found.ids[0]))
    return output.token_ids[-1]


def _checked(distribution: Distribution, sequence_id: int) -> Distribution:
    """Ids int64 and probabilities fp64. Raises ValueError unless they are unique, not negative and sum to 1."""
    ids = np.asarray(distribution[0], dtype=np.int64)
    probabilities = np.asarray(distribution[1], dtype=np.float64)
    total = float(probabilities.sum())
    if ids.shape != probabilities.shape or len(np.unique(ids)) != len(ids):
        raise ValueError(f"sequence {sequence_id}: a draft distribution has repeated ids or unequal lengths")
    if not (probabilities >= 0).all() or not abs(total - 1.0) < 1e-3:
        raise ValueError(f"sequence {sequence_id}: a draft distribution sums to {total}, expected 1")
    return ids, probabilities / total


def _target(processed: np.ndarray, row: Row) -> Distribution:
    """The target's distribution at one row: surviving ids in ascending order and their probabilities, fp64."""
    left = survivors(temper(processed[None], [row]), [row])
    order = np.argsort(left.ids)
    values = left.logits[order].astype(np.float64)
    weights = np.exp(values - values.max())
    return left.ids[order], weights / weights.sum()


def _lookup(distribution: Distribution, ids: np.ndarray) -> np.ndarray:
    """Probabilities of ids, 0 where the distribution does not name them."""
    order = np.argsort(distribution[0])
    known = distribution[0][order]
    if not len(known):
        return np.zeros(len(ids))
    place = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return np.where(known[place] == ids, distribution[1][order][place], 0.0)


def _judge(row: Row, target: Distribution, draft: int, proposal: Distribution) -> tuple[bool, int | None]:
    """(kept, token). token None: the draft's own distribution cannot have given it; the ordinary sample stands."""
    p = float(_lookup(target, np.asarray([draft]))[0])
    q = float(_lookup(proposal, np.asarray([draft]))[0])
    if q == 0.0:
        return False, None
    key = (row.params.seed, row.position, draft, row.sequence.choice)
    if float(noise.uniform(*key, Purpose.ACCEPT)) * q < p:
        return True, draft
    residual = np.maximum(target[1] - _lookup(proposal, target[0]), 0.0)
    left = np.flatnonzero(residual > 0)
    if not len(left):
        # p <= q everywhere means p = q, where nothing is rejected; only rounding leads here.
        return False, None
    gumbel = noise.gumbel(row.params.seed, row.position, target[0][left], row.sequence.choice, Purpose.RESIDUAL)
    return False, int(target[0][left][np.argmax(np.log(residual[left]) + gumbel)])
