"""The sampler: raw logits of many rows to one token each, in the order that the contract names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.lm import noise
from tandem.lm.noise import Purpose
from tandem.lm.processors import NEVER, Processors, Row, needs_processing
from tandem.lm.truncation import Survivors, truncate

# Slack on the bound that prunes rows, for the rounding of logit + noise in fp32.
_SLACK = 1e-3


@dataclass(frozen=True)
class Sampled:
    """One id per row (int64 [rows]); errors: ErrorReason name per row that has no answer."""

    ids: np.ndarray
    errors: dict[int, str]


class Sampler:
    """Samples rows; holds token counts of sequences with penalties until they are forgotten."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._processors = Processors(vocab_size)

    def forget(self, sequence_id: int) -> None:
        self._processors.forget(sequence_id)

    def process(self, logits: np.ndarray, rows: list[Row]) -> np.ndarray:
        """Processed logits fp32 [rows, vocab], before temperature; the argument itself if no row changes."""
        changed = [index for index, row in enumerate(rows) if needs_processing(row)]
        if not changed:
            return logits
        if len(changed) == len(rows):
            part = logits.copy()
            self._processors.apply(part, rows)
            return part
        part = logits[changed]
        self._processors.apply(part, [rows[index] for index in changed])
        processed = logits.copy()
        processed[changed] = part
        return processed

    def sample(self, logits: np.ndarray, rows: list[Row]) -> Sampled:
        """Samples each row of raw logits, fp32 [rows, vocab]; does not change them."""
        processed = self.process(logits, rows)
        ids = processed.argmax(axis=1)
        peak = processed[np.arange(len(rows)), ids]
        errors = {int(row): "NO_ALLOWED_TOKEN" for row in np.flatnonzero(peak == NEVER)}
        errors.update({int(row): "INTERNAL" for row in np.flatnonzero(np.isnan(peak) | (peak == np.inf))})
        random = np.asarray(
            [index for index, row in enumerate(rows) if not row.params.greedy and index not in errors], dtype=np.int64
        )
        if len(random):
            params = [rows[index].params for index in random]
            top_k = np.asarray([item.top_k for item in params])
            top_p = np.asarray([item.top_p for item in params], dtype=np.float32)
            cut = (top_k > 0) | (top_p < 1.0)
            for part, truncated in ((random[cut], True), (random[~cut], False)):
                if len(part):
                    ids[part] = self._draw(processed[part], [rows[index] for index in part], truncated)
        return Sampled(ids, errors)

    def _draw(self, logits: np.ndarray, rows: list[Row], truncated: bool) -> np.ndarray:
        """Gumbel-max over survivors of processed logits: ids int64 [rows]."""
        params = [row.params for row in rows]
        scaled = logits / np.asarray([item.temperature for item in params], dtype=np.float32)[:, None]
        min_p = np.asarray([item.min_p for item in params], dtype=np.float32)
        seeds = np.asarray([item.seed for item in params], dtype=np.uint64)
        positions = np.asarray([row.position for row in rows])
        choices = np.asarray([row.sequence.choice for row in rows])
        if truncated:
            top_k = np.asarray([item.top_k for item in params])
            top_p = np.asarray([item.top_p for item in params], dtype=np.float32)
            left = truncate(scaled, top_k, top_p, min_p)
        else:
            left = _contenders(scaled, min_p, seeds, positions, choices)
        keyed = (seeds[left.rows], positions[left.rows], left.ids, choices[left.rows])
        return _best(left, left.logits + noise.gumbel(*keyed, Purpose.SAMPLE), len(rows))


def _contenders(
    scaled: np.ndarray, min_p: np.ndarray, seeds: np.ndarray, positions: np.ndarray, choices: np.ndarray
) -> Survivors:
    """Ids that can win at all: noise is bounded, so what lies too far below one known value cannot.

    Exact: the greatest logit's own value is a lower bound of the winner's, and no noise exceeds GUMBEL_MAX.
    """
    first = scaled.argmax(axis=1)
    peak = scaled[np.arange(len(scaled)), first]
    reached = peak + noise.gumbel(seeds, positions, first, choices, Purpose.SAMPLE)
    with np.errstate(divide="ignore"):
        floor = np.maximum(reached - np.float32(noise.GUMBEL_MAX + _SLACK) - np.abs(peak) * 1e-6, peak + np.log(min_p))
    # The first id always stays, whatever rounding does to the floor.
    rows, ids = np.nonzero((scaled >= np.minimum(floor, peak)[:, None]) & (scaled > NEVER))
    return Survivors(rows, ids, scaled[rows, ids])


def _best(left: Survivors, values: np.ndarray, rows: int) -> np.ndarray:
    """Id of the greatest value per row, ties to the lowest id; every row has at least one survivor."""
    order = np.lexsort((left.ids, -values, left.rows))
    starts = np.searchsorted(left.rows[order], np.arange(rows))
    return left.ids[order][starts]
