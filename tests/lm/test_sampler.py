"""The vectorised sampler against a row-by-row reference that sorts everything and draws all noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tandem.lm import noise
from tandem.lm.processors import Row
from tandem.lm.sampler import Sampler
from tandem.lm.types import SamplingParams, Sequence

VOCAB = 700


def sequence(
    params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None, **extra: Any
) -> Sequence:
    prompt = prompt or [1, 2, 3]
    fields = {"id": 1, "choice": 0, "params": params, "token_ids": prompt + (output or []), "prompt_len": len(prompt)}
    return Sequence(**(fields | extra))


def logits_of(rows: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(rows, VOCAB)) * scale
    return values.astype(np.float32)


def reference(logits: np.ndarray, row: Row) -> int:
    """One row, step by step, in the order of the contract."""
    params = row.params
    values = logits.astype(np.float32).copy()
    ids = np.arange(len(values))
    history = row.sequence.token_ids + list(row.drafts)
    output = history[row.sequence.prompt_len :]
    never = np.float32(-np.inf)
    if row.mask is not None:
        allowed = [(int(row.mask[i // 32]) >> (i % 32)) & 1 for i in ids]
        values[np.asarray(allowed) == 0] = never
    for token, bias in params.logit_bias:
        values[token] += np.float32(bias)
    if params.allowed_token_ids:
        values[~np.isin(ids, params.allowed_token_ids)] = never
    for word in params.bad_words:
        if len(word) == 1 or tuple(history[-(len(word) - 1) :]) == word[:-1]:
            values[word[-1]] = never
    if len(output) < params.min_tokens:
        values[list(params.stop_token_ids)] = never
    for token in set(history):
        penalty = np.float32(params.repetition_penalty)
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(output):
        values[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token)) + np.float32(
            params.presence_penalty
        )
    if params.temperature == 0:
        return int(values.argmax())
    values = values / np.float32(params.temperature)
    order = sorted(ids[values > never], key=lambda i: (-values[i], i))
    weight = {i: float(np.exp(values[i] - values[order[0]])) for i in order}
    if params.min_p > 0:
        order = [i for i in order if values[i] >= values[order[0]] + np.log(np.float32(params.min_p))]
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1:
        total, before, kept = sum(weight[i] for i in order), 0.0, []
        for i in order:
            if before < params.top_p * total:
                kept.append(i)
            before += weight[i]
        order = kept
    gumbel = noise.gumbel(params.seed, row.position, np.asarray(order), row.sequence.choice)
    return min(zip(-(values[order] + gumbel), order, strict=True))[1]


def random_params(rng: np.random.Generator) -> SamplingParams:
    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.5 else default

    return SamplingParams(
        temperature=maybe(float(rng.uniform(0.1, 2)), 0.0 if rng.random() < 0.3 else 1.0),
        top_k=maybe(int(rng.integers(1, 400)), 0),
        top_p=maybe(float(rng.uniform(0.05, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.3)), 0.0),
        seed=int(rng.integers(0, 2**63)) * 2 + 1,
        repetition_penalty=maybe(float(rng.uniform(0.6, 2)), 1.0),
        frequency_penalty=maybe(float(rng.uniform(-1, 2)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-1, 2)), 0.0),
        logit_bias=maybe(((5, 4.0), (9, -100.0), (650, 6.5)), ()),
        allowed_token_ids=maybe(tuple(range(0, VOCAB, 3)), ()) if rng.random() < 0.3 else (),
        bad_words=maybe(((12,), (7, 30), (7, 8, 33)), ()),
        min_tokens=int(rng.integers(0, 8)),
        stop_token_ids=(2, 40),
    )


@pytest.mark.parametrize("trial", range(12))
def test_against_the_reference(trial: int) -> None:
    rng = np.random.default_rng(trial)
    count = 24
    logits = logits_of(count, trial, scale=float(rng.choice([0.3, 2.0, 6.0])))
    if trial % 3 == 0:
        # Coarse values: many ties, also across the edge of top-k.
        logits = np.round(logits)
    rows = []
    for index in range(count):
        drafts = tuple(rng.integers(0, VOCAB, size=rng.integers(0, 4)).tolist())
        if rng.random() < 0.3:
            drafts = (7, 8)
        mask = rng.integers(-(2**31), 2**31, size=-(-VOCAB // 32)).astype(np.int32) if rng.random() < 0.3 else None
        output = rng.integers(0, VOCAB, size=rng.integers(0, 20)).tolist()
        own = sequence(random_params(rng), output=[*output, 7], id=index, choice=int(rng.integers(0, 3)))
        rows.append(Row(own, drafts, mask))
    found = Sampler(VOCAB).sample(logits, rows)
    assert not found.errors
    assert found.ids.tolist() == [reference(logits[i], row) for i, row in enumerate(rows)]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(5)
    logits = logits_of(16, 3)
    rows = [Row(sequence(random_params(rng), id=index)) for index in range(16)]
    together = Sampler(VOCAB).sample(logits, rows).ids
    alone = [int(Sampler(VOCAB).sample(logits[i : i + 1], rows[i : i + 1]).ids[0]) for i in range(16)]
    assert together.tolist() == alone


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [650, 17, 300]] = 4.0
    assert Sampler(VOCAB).sample(logits, [Row(sequence(SamplingParams(temperature=0.0)))]).ids[0] == 17
    one = SamplingParams(temperature=1.0, top_k=1, seed=3)
    assert Sampler(VOCAB).sample(logits, [Row(sequence(one))]).ids[0] == 17


def test_flat_logits_need_all_noise() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    row = Row(sequence(SamplingParams(temperature=1.0, seed=77)))
    assert Sampler(VOCAB).sample(logits, [row]).ids[0] == reference(logits[0], row)


def test_frequencies_follow_the_distribution() -> None:
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, :4] = np.log([0.5, 0.25, 0.15, 0.1])
    draws = 4000
    rows = [Row(sequence(SamplingParams(temperature=1.0, seed=seed))) for seed in range(draws)]
    ids = Sampler(VOCAB).sample(np.repeat(logits, draws, axis=0), rows).ids
    expected = draws * np.asarray([0.5, 0.25, 0.15, 0.1])
    chi_squared = float(((np.bincount(ids, minlength=4)[:4] - expected) ** 2 / expected).sum())
    # 99.9% quantile with 3 degrees of freedom.
    assert chi_squared < 16.3


def test_nothing_allowed_is_an_error_of_that_row_alone() -> None:
    logits = logits_of(3)
    dead = Row(sequence(SamplingParams(temperature=1.0)), (), np.zeros(-(-VOCAB // 32), np.int32))
    plain = Row(sequence(SamplingParams(temperature=0.0)))
    found = Sampler(VOCAB).sample(logits, [plain, dead, plain])
    assert found.errors == {1: "NO_ALLOWED_TOKEN"}
    assert found.ids[0] == logits[0].argmax() and found.ids[2] == logits[2].argmax()


def test_nan_logits_are_an_internal_error() -> None:
    logits = logits_of(2)
    logits[1, 5] = np.nan
    rows = [Row(sequence(SamplingParams(temperature=1.0, seed=4))) for _ in range(2)]
    assert Sampler(VOCAB).sample(logits, rows).errors == {1: "INTERNAL"}


def test_grammar_beats_min_tokens() -> None:
    """Where the grammar accepts nothing but a stop, min_tokens does not forbid it."""
    params = SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=(2,))
    only_stop = np.zeros(-(-VOCAB // 32), np.int32)
    only_stop[0] = 1 << 2
    found = Sampler(VOCAB).sample(logits_of(1), [Row(sequence(params), (), only_stop)])
    assert not found.errors and found.ids[0] == 2
    also_other = only_stop.copy()
    also_other[0] |= 1 << 9
    assert Sampler(VOCAB).sample(logits_of(1), [Row(sequence(params), (), also_other)]).ids[0] == 9


def test_logits_are_not_changed() -> None:
    logits = logits_of(2)
    before = logits.copy()
    params = SamplingParams(temperature=0.8, repetition_penalty=1.5, logit_bias=((3, 9.0),), top_p=0.5)
    Sampler(VOCAB).sample(logits, [Row(sequence(params)), Row(sequence(SamplingParams(temperature=0.0)))])
    assert np.array_equal(logits, before)


def test_penalty_counts_follow_the_sequence() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    own, sampler = sequence(params), Sampler(VOCAB)
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [50, 60]] = 1.5, 1.0
    for expected in (50, 60):
        token = int(sampler.sample(logits, [Row(own)]).ids[0])
        assert token == expected
        own.token_ids.append(token)
    sampler.forget(own.id)
    fresh = dataclasses.replace(params, presence_penalty=0.0)
    assert sampler.sample(logits, [Row(sequence(fresh))]).ids[0] == 50
