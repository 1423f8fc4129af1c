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
        scaled, keys = temper(logits, rows), Keys.of(rows)
        min_p = np.asarray([row.params.min_p for row in rows], dtype=np.float32)
        left = _truncated(scaled, rows, min_p) if truncated else _contenders(scaled, min_p, keys)
        return best(left, left.logits + keys.gumbel(left, Purpose.SAMPLE), len(rows))


@dataclass(frozen=True)
class Keys:
    """What the noise of each row is keyed by, besides the token id."""

    seeds: np.ndarray
    positions: np.ndarray
    choices: np.ndarray

    @staticmethod
    def of(rows: list[Row]) -> Keys:
        return Keys(
            np.asarray([row.params.seed for row in rows], dtype=np.uint64),
            np.asarray([row.position for row in rows]),
            np.asarray([row.sequence.choice for row in rows]),
        )

    def gumbel(self, left: Survivors, purpose: Purpose) -> np.ndarray:
        """Noise fp32 for each survivor."""
        rows = left.rows
        return noise.gumbel(self.seeds[rows], self.positions[rows], left.ids, self.choices[rows], purpose)


def temper(logits: np.ndarray, rows: list[Row]) -> np.ndarray:
    """Logits divided by each row's temperature, fp32."""
    return logits / np.asarray([row.params.temperature for row in rows], dtype=np.float32)[:, None]


def survivors(scaled: np.ndarray, rows: list[Row]) -> Survivors:
    """All ids that temperature-scaled logits leave after min_p, top-k and top-p."""
    min_p = np.asarray([row.params.min_p for row in rows], dtype=np.float32)
    if any(row.params.top_k > 0 or row.params.top_p < 1.0 for row in rows):
        return _truncated(scaled, rows, min_p)
    with np.errstate(divide="ignore"):
        floor = scaled.max(axis=1) + np.log(min_p)
    where, ids = np.nonzero((scaled >= floor[:, None]) & (scaled > NEVER))
    return Survivors(where, ids, scaled[where, ids])


def _truncated(scaled: np.ndarray, rows: list[Row], min_p: np.ndarray) -> Survivors:
    top_k = np.asarray([row.params.top_k for row in rows])
    top_p = np.asarray([row.params.top_p for row in rows], dtype=np.float32)
    return truncate(scaled, top_k, top_p, min_p)


def _contenders(scaled: np.ndarray, min_p: np.ndarray, keys: Keys) -> Survivors:
    """Ids that can win at all: noise is bounded, so what lies too far below one known value cannot.

    Exact: the greatest logit's own value is a lower bound of the winner's, and no noise exceeds GUMBEL_MAX.
    """
    first = scaled.argmax(axis=1)
    peak = scaled[np.arange(len(scaled)), first]
    reached = peak + noise.gumbel(keys.seeds, keys.positions, first, keys.choices, Purpose.SAMPLE)
    with np.errstate(divide="ignore"):
        floor = np.maximum(reached - np.float32(noise.GUMBEL_MAX + _SLACK) - np.abs(peak) * 1e-6, peak + np.log(min_p))
    # The first id always stays, whatever rounding does to the floor.
    rows, ids = np.nonzero((scaled >= np.minimum(floor, peak)[:, None]) & (scaled > NEVER))
    return Survivors(rows, ids, scaled[rows, ids])


def best(left: Survivors, values: np.ndarray, rows: int) -> np.ndarray:
    """Id of the greatest value per row, ties to the lowest id; every row has at least one survivor."""
    order = np.lexsort((left.ids, -values, left.rows))
    starts = np.searchsorted(left.rows[order], np.arange(rows))
    return left.ids[order][starts]
