"""Verification by rejection: the distribution of whole outputs is the target's."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from tandem.lm import noise, rejection
from tandem.lm.noise import Purpose
from tandem.lm.processors import Row
from tandem.lm.sampler import Sampler
from tandem.lm.types import SamplingParams, Sequence, Slice, SliceOutput

VOCAB = 5
LENGTH = 3
DRAWS = 1200


def target_logits(history: tuple[int, ...]) -> np.ndarray:
    """Logits fp32 [VOCAB] after a history: a fixed function of it."""
    rng = np.random.default_rng([3, len(history), *history])
    return (rng.normal(size=VOCAB) * 0.7).astype(np.float32)


def proposal(history: tuple[int, ...], kind: str) -> np.ndarray:
    """The draft's distribution [VOCAB]."""
    probabilities = np.random.default_rng([8, len(history), *history]).dirichlet(np.ones(VOCAB))
    if kind == "greedy":
        return np.eye(VOCAB)[probabilities.argmax()]
    if kind == "truncated":
        probabilities[np.argsort(probabilities)[:2]] = 0
    return probabilities / probabilities.sum()


def propose(history: tuple[int, ...], kind: str, seed: int, count: int, purpose: Purpose) -> tuple[list[int], list]:
    drafts, distributions = [], []
    for _ in range(count):
        q = proposal(history, kind)
        ids = np.flatnonzero(q)
        gumbel = noise.gumbel(seed, len(history), ids, 0, purpose)
        drafts.append(int(ids[np.argmax(np.log(q[ids]) + gumbel)]))
        distributions.append((ids, q[ids]))
        history = (*history, drafts[-1])
    return drafts, distributions


def generate(params: SamplingParams, kind: str, purpose: Purpose = Purpose.DRAFT) -> tuple[int, ...]:
    """LENGTH tokens, two drafts at a time."""
    sampler = Sampler(VOCAB)
    sequence = Sequence(1, 0, params, [0], 1)
    while sequence.output_len < LENGTH:
        history = tuple(sequence.token_ids[1:])
        drafts, distributions = propose(history, kind, params.seed, 2, purpose)
        rows = [Row(sequence, tuple(drafts[:count])) for count in range(3)]
        logits = np.stack([target_logits((*history, *row.drafts)) for row in rows])
        item = Slice(sequence, [0], 0, 1, tuple(drafts), distributions=tuple(distributions))
        output = SliceOutput()
        rejection.verify(sampler, logits, item, rows, output)
        assert output.error is None and len(output.token_ids) == output.accepted + 1
        sequence.token_ids += output.token_ids
    return tuple(sequence.token_ids[1 : 1 + LENGTH])


def exact(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of each output of LENGTH tokens under the target with temperature and top-k."""
    found = {}
    for output in itertools.product(range(VOCAB), repeat=LENGTH):
        probability = 1.0
        for step, token in enumerate(output):
            logits = target_logits(output[:step]).astype(np.float64) / params.temperature
            if params.top_k:
                logits[np.argsort(-logits)[params.top_k :]] = -np.inf
            weights = np.exp(logits - logits.max())
            probability *= weights[token] / weights.sum()
        found[output] = probability
    return found


def chi_squared(counts: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """Standardised statistic: about normal with mean 0 and deviation 1. Rare outputs are pooled."""
    common = {output: p for output, p in expected.items() if p * DRAWS >= 5}
    rest = 1 - sum(common.values())
    statistic = sum((counts[output] - DRAWS * p) ** 2 / (DRAWS * p) for output, p in common.items())
    if rest * DRAWS >= 5:
        seen = DRAWS - sum(counts[output] for output in common)
        statistic += (seen - DRAWS * rest) ** 2 / (DRAWS * rest)
    freedom = len(common) - (rest * DRAWS < 5)
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("kind", "top_k"),
    [
        ("sampled", 0),
        pytest.param("greedy", 0, marks=pytest.mark.slow),
        pytest.param("truncated", 3, marks=pytest.mark.slow),
    ],
)
def test_outputs_follow_the_target(kind: str, top_k: int) -> None:
    counts: Counter = Counter()
    for seed in range(DRAWS):
        counts[generate(SamplingParams(temperature=0.9, top_k=top_k, seed=seed * 7919 + 1), kind)] += 1
    # Four deviations.
    assert chi_squared(counts, exact(SamplingParams(temperature=0.9, top_k=top_k))) < 4


def test_shared_noise_would_be_seen() -> None:
    """The test above can fail: a draft that shares the noise of its acceptance skews the output."""
    counts: Counter = Counter()
    for seed in range(DRAWS):
        counts[generate(SamplingParams(temperature=0.9, seed=seed * 7919 + 1), "sampled", Purpose.ACCEPT)] += 1
    assert chi_squared(counts, exact(SamplingParams(temperature=0.9))) > 8


def test_greedy_target_keeps_the_argmax() -> None:
    greedy = SamplingParams(temperature=0.0)
    expected: tuple[int, ...] = ()
    for _ in range(LENGTH):
        expected = (*expected, int(target_logits(expected).argmax()))
    assert generate(greedy, "sampled") == expected


@pytest.mark.parametrize(
    ("distribution", "reason"),
    [(([1, 1], [0.5, 0.5]), "repeated"), (([1, 2], [0.5, 0.6]), "sums to"), (([1], [np.nan]), "sums to")],
)
def test_what_is_no_distribution_is_refused(distribution: tuple, reason: str) -> None:
    sequence = Sequence(1, 0, SamplingParams(temperature=1.0), [0], 1)
    arrays = (np.asarray(distribution[0]), np.asarray(distribution[1]))
    item = Slice(sequence, [0], 0, 1, (1,), distributions=(arrays,))
    rows = [Row(sequence), Row(sequence, (1,))]
    with pytest.raises(ValueError, match=reason):
        rejection.verify(Sampler(VOCAB), np.zeros((2, VOCAB), np.float32), item, rows, SliceOutput())


def test_a_draft_that_its_distribution_does_not_name_is_not_kept() -> None:
    sequence = Sequence(1, 0, SamplingParams(temperature=1.0, seed=5), [0], 1)
    item = Slice(sequence, [0], 0, 1, (1,), distributions=((np.asarray([2]), np.asarray([1.0])),))
    output, logits = SliceOutput(), np.zeros((2, VOCAB), np.float32)
    rows = [Row(sequence), Row(sequence, (1,))]
    rejection.verify(Sampler(VOCAB), logits, item, rows, output)
    assert output.accepted == 0 and output.token_ids == Sampler(VOCAB).sample(logits, rows).ids[:1].tolist()
