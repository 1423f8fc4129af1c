"""Rejection keeps the target's distribution exactly: whole outputs of three tokens against the true probabilities."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tandem.lm import noise
from tandem.lm.noise import Purpose
from tandem.lm.processors import Row
from tandem.lm.proposers import DraftSampling, DraftSequence
from tandem.lm.proposers.model import ModelProposer
from tandem.lm.rejection import verify
from tandem.lm.sampler import Sampler
from tandem.lm.types import ModelSpec, SamplingParams, Sequence, Slice, SliceOutput, TokenScore

VOCAB = 3
LENGTH = 3
RUNS = 1_000
# Chi-squared with 26 degrees of freedom: one run in 10,000 is above it.
CRITICAL = 60.1


def logits(prefix: list[int], sharpness: float, shift: int) -> np.ndarray:
    """fp32 [VOCAB] that depend on the last two tokens and the length."""
    last = prefix[-1] + 2 * prefix[-2] + len(prefix) + shift
    return np.array([sharpness * math.sin(1.7 * token + 0.9 * last) for token in range(VOCAB)], np.float32)


def target_logits(prefix: list[int]) -> np.ndarray:
    return logits(prefix, 1.2, 0)


class DraftModel:
    """The draft: other preferences than the target's. Only what a model proposer uses of a runner."""

    spec = ModelSpec("toy", VOCAB, 1, 64, 16, 8, 1, 1, "", "", True, "", 1)

    def execute(self, slices: list[Slice]) -> list[SliceOutput]:
        outputs = []
        for piece in slices:
            raw = logits(piece.sequence.token_ids, 1.5, 1).astype(np.float64)
            scores = raw - math.log(np.exp(raw).sum())
            order = np.argsort(-scores)
            best = int(order[0])
            score = TokenScore(best, float(scores[best]), 1, tuple(order.tolist()), tuple(scores[order].tolist()))
            outputs.append(SliceOutput([best], scores=[score]) if piece.sample else SliceOutput())
        return outputs

    def forget(self, sequence_id: int) -> None: ...
    def close(self) -> None: ...


def drawn(proposer: ModelProposer, tokens: list[int], seed: int, count: int, top_k: int) -> tuple[tuple, tuple]:
    """Drafts of the real proposer and their distributions."""
    sampling = DraftSampling(seed=seed, temperature=0.9, top_k=top_k, want_distribution=True)
    sequence = DraftSequence(seed, list(tokens), prompt_len=2, sampling=sampling)
    proposer.start(sequence)
    proposer.extend(sequence, 0)
    guess = proposer.propose([(sequence, count)])[0]
    proposer.finish(sequence, completed=False)
    assert guess.distributions is not None
    return guess.ids, tuple((np.array(ids), np.array(chances)) for ids, chances in guess.distributions)


def write(seed: int, kind: str, sampler: Sampler, proposer: ModelProposer, params: SamplingParams) -> tuple[int, ...]:
    """One output of three tokens, in as many steps as it takes."""
    sequence = Sequence(seed, 0, params, [0, 1], 2)
    while sequence.output_len < LENGTH:
        room = LENGTH - sequence.output_len - 1
        drafts: tuple[int, ...] = ()
        distributions: tuple = ()
        if room and kind == "greedy":
            best = [int(np.argmax(logits(sequence.token_ids, 1.5, 1)))]
            drafts, distributions = tuple(best), ((np.array(best), np.ones(1)),)
        elif room:
            drafts, distributions = drawn(proposer, sequence.token_ids, seed, room, 2 if kind == "truncated" else 0)
        rows = [Row(sequence, drafts[:count]) for count in range(1 + len(drafts))]
        raw = np.stack([target_logits([*sequence.token_ids, *row.drafts]) for row in rows])
        output = SliceOutput()
        piece = Slice(sequence, [0], 0, len(sequence.token_ids), drafts, distributions=distributions)
        verify(sampler, raw, piece, rows, output)
        assert output.token_ids and output.error is None
        sequence.token_ids.extend(output.token_ids)
    return tuple(sequence.token_ids[2 : 2 + LENGTH])


def truth(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Exact probability of every output."""
    found = {}
    for output in itertools.product(range(VOCAB), repeat=LENGTH):
        tokens, chance = [0, 1], 1.0
        for token in output:
            scaled = target_logits(tokens).astype(np.float64) / params.temperature
            weights = np.exp(scaled)
            if params.top_k:
                weights[np.argsort(-weights)[params.top_k :]] = 0
            chance *= weights[token] / weights.sum()
            tokens.append(token)
        found[output] = chance
    return found


def statistic(kind: str, params: SamplingParams) -> float:
    """Chi-squared of RUNS outputs; outputs that the target cannot write must not occur."""
    sampler, proposer = Sampler(VOCAB), ModelProposer(DraftModel(), max_drafts=2)  # type: ignore[arg-type]
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(1, RUNS + 1):
        own = SamplingParams(temperature=params.temperature, top_k=params.top_k, seed=seed)
        output = write(seed, kind, sampler, proposer, own)
        counts[output] = counts.get(output, 0) + 1
        sampler.forget(seed)
    expected = truth(params)
    assert all(expected[output] > 0 for output in counts)
    return sum((counts.get(o, 0) - RUNS * p) ** 2 / (RUNS * p) for o, p in expected.items() if p > 0)


@pytest.mark.parametrize(
    "kind", ["sampled", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("greedy", "truncated"))]
)
def test_output_has_the_targets_distribution(kind: str) -> None:
    assert statistic(kind, SamplingParams(temperature=0.8)) < CRITICAL


@pytest.mark.slow
def test_output_has_the_truncated_targets_distribution() -> None:
    assert statistic("sampled", SamplingParams(temperature=0.8, top_k=2)) < CRITICAL


def test_shared_noise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself is tested: drafts drawn with the verifier's noise shift the distribution, and it shows."""
    original = noise.gumbel

    def planted(seeds, positions, ids, choices, purpose=Purpose.SAMPLE):  # type: ignore[no-untyped-def]
        return original(seeds, positions, ids, choices, Purpose.ACCEPT if purpose is Purpose.DRAFT else purpose)

    monkeypatch.setattr(noise, "gumbel", planted)
    assert statistic("sampled", SamplingParams(temperature=0.8)) > CRITICAL
