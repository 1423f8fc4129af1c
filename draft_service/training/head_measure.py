"""Held-out acceptance of a head, with the arithmetic that serves it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from draft_service.training.measure import Acceptance
from draft_service.training.states import Corpus
from tandem.lm import noise
from tandem.lm.proposers.head_net import HeadNet

_ROWS = 256


@dataclass(slots=True)
class HeadAcceptance:
    """free: drafting with its own drafts as inputs. forced: per position, with the target's tokens as inputs, whatever
    the drafts before it were: (right, tried)."""

    free: Acceptance
    forced: list[tuple[int, int]] = field(default_factory=list)

    def report(self) -> dict[str, object]:
        return {
            "positions": self.free.positions,
            "acceptance_by_position": self.free.by_position(),
            "acceptance_length": round(self.free.length, 4),
            "teacher_forced_by_position": [round(right / max(1, tried), 4) for right, tried in self.forced],
        }


def measure_head(
    net: HeadNet,
    ids: np.ndarray,
    corpus: Corpus,
    embedding: np.ndarray,
    most: int = 5,
    temperature: float = 0.0,
) -> HeadAcceptance:
    """Counts over all rows with a next token.

    ids: the head's vocabulary; embedding: fp32 [target vocab, hidden]. temperature: that of the answers; above 0 drafts
    are drawn with the noise that the answers were drawn with (corpus.talk are the sampling seeds). A corpus that says
    by row how it was drawn is believed instead.
    """
    free = Acceptance(reached=[0] * most, right=[0] * most)
    forced = [[0, 0] for _ in range(most)]
    rows = np.flatnonzero(corpus.left >= 1)
    free.positions = free.proposed = len(rows)
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        for own in (True, False):
            _count(net, ids, corpus, embedding, part, temperature, free if own else None, forced)
    return HeadAcceptance(free, [(right, tried) for right, tried in forced])


def _count(
    net: HeadNet,
    ids: np.ndarray,
    corpus: Corpus,
    embedding: np.ndarray,
    rows: np.ndarray,
    temperature: float,
    free: Acceptance | None,
    forced: list[list[int]],
) -> None:
    """One chunk of rows, with the head's own drafts as inputs (`free`) or the target's tokens (`forced`)."""
    state = np.ascontiguousarray(net.start(corpus.hidden[rows].astype(np.float32)))
    inputs = corpus.tokens[rows]
    for ahead in range(1, len(forced) + 1):
        # Answers that end here are done, and of the head's own drafts those behind a wrong one.
        there = corpus.left[rows] >= ahead
        rows, inputs, state = rows[there], inputs[there], np.ascontiguousarray(state[there])
        if not len(rows):
            return
        logits = net.step(state, np.ascontiguousarray(embedding[inputs]))
        logits = _drawn(logits, ids, corpus, rows, ahead, temperature)
        truth = corpus.tokens[rows + ahead]
        right = ids[logits.argmax(axis=1)] == truth
        inputs = truth
        if free is None:
            forced[ahead - 1][0] += int(right.sum())
            forced[ahead - 1][1] += len(rows)
        else:
            free.reached[ahead - 1] += len(rows)
            free.right[ahead - 1] += int(right.sum())
            # A right draft is the truth.
            rows, inputs, state = rows[right], inputs[right], np.ascontiguousarray(state[right])


def _drawn(
    logits: np.ndarray, ids: np.ndarray, corpus: Corpus, rows: np.ndarray, ahead: int, temperature: float
) -> np.ndarray:
    """Logits [rows, ids] whose largest is what the sampler would draw from them; those of greedy answers stay."""
    if corpus.temperature is None:
        temperatures = np.full(len(rows), temperature, np.float32)
    else:
        temperatures = corpus.temperature[rows]
    sampled = np.flatnonzero(temperatures > 0)
    if not len(sampled):
        return logits
    at = rows[sampled]
    choices = np.zeros(len(at), np.int64) if corpus.choice is None else corpus.choice[at]
    places = corpus.place[at] + ahead
    seeds = corpus.talk[at]
    logits = logits.copy()
    logits[sampled] /= temperatures[sampled][:, None]
    logits[sampled] += noise.gumbel(seeds[:, None], places[:, None], ids, choices[:, None])
    return logits
