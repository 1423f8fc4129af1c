"""Sampling and scoring on the compiled CPU kernels: the meaning of tandem.lm.sampler and tandem.lm.scores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kernels.cpu import sampling
from tandem.lm.noise import Purpose
from tandem.lm.processors import Row, needs_processing
from tandem.lm.sampler import Sampled, Sampler
from tandem.lm.types import TokenScore

_SAMPLE = int(Purpose.SAMPLE)
_ERRORS = {sampling.NO_ALLOWED_TOKEN: "NO_ALLOWED_TOKEN", sampling.NOT_A_NUMBER: "INTERNAL"}


class CompiledSampler(Sampler):
    """Sampler whose argmax, truncation and noise are native; masks, biases and penalties stay as they are."""

    def __init__(
        self, vocab_size: int, greatest: Callable[[np.ndarray], np.ndarray | None] = lambda logits: None
    ) -> None:
        """greatest: ids int32 [rows] of the greatest raw logits, -1 or -2 as sampling.sample, if they are known."""
        super().__init__(vocab_size)
        self._greatest = greatest

    def sample(self, logits: np.ndarray, rows: list[Row]) -> Sampled:
        """Samples each row of raw logits, fp32 [rows, vocab]; does not change them."""
        ids = None
        if all(row.params.greedy and not needs_processing(row) for row in rows):
            ids = self._greatest(logits)
        if ids is None:
            params = np.array([self._params(row) for row in rows], sampling.SAMPLE)
            ids = sampling.sample(self.process(logits, rows), params)
        errors = {}
        if len(ids) and ids.min() < 0:
            errors = {index: _ERRORS[int(ids[index])] for index in np.flatnonzero(ids < 0).tolist()}
        return Sampled(np.maximum(ids, 0).astype(np.int64), errors)

    def _params(self, row: Row) -> tuple[float | int, ...]:
        """A row's record of SAMPLE."""
        given, sequence = row.params, row.sequence
        top_k = min(given.top_k, self.vocab_size)
        key = (given.seed, row.position, sequence.choice, _SAMPLE)
        return (given.temperature, given.top_p, given.min_p, top_k, *key, 0)


def token_scores(logits: np.ndarray, ids: list[int], alternatives: list[int]) -> list[TokenScore]:
    """Score of one id per row of raw logits fp32 [rows, vocab], with its rank and the row's most likely ids."""
    rows = np.arange(len(ids), dtype=np.int32)
    counts = np.asarray([min(count, logits.shape[1]) for count in alternatives], np.int32)
    found = sampling.score(logits, rows, np.asarray(ids, np.int32), counts)
    return [
        TokenScore(
            id=int(token),
            logprob=float(found.logprobs[row]),
            rank=int(found.ranks[row]),
            top_ids=tuple(found.top_ids[row, :count].tolist()),
            top_logprobs=tuple(found.top_logprobs[row, :count].tolist()),
        )
        for row, (token, count) in enumerate(zip(ids, counts.tolist(), strict=True))
    ]
