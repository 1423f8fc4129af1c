"""Rejection with the head's own drafts, through the whole step loop: outputs have the target's distribution."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_service.policy import SchedulerConfig
from tandem.lm import noise
from tandem.lm.noise import Purpose
from tandem.lm.proposers.head import HeadProposer
from tandem.lm.proposers.head_file import HeadFile, quantize
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import Runner, SamplingParams, Sequence, Slice
from tests.engine_service.harness import Harness
from tests.heads import eager, random_head

VOCAB = 4
LENGTH = 3
RUNS = 1_600
PROMPT = [1, 0, 3, 2]
TEMPERATURE = 0.9
# Deviations of the standardised statistic: fewer than one run in 10,000 is above.
CRITICAL = 4.0


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """A random Llama that knows four tokens, none of which it is sure of."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.12,
    )
    path: Path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    loaded = load_runner(
        RunnerSettings(path, numerics="exact", kernels="torch", threads=1, block_size=8, kv_cache_bytes=1 << 20)
    )
    yield loaded
    loaded.close()


class Sampled(Harness):
    """The loop without checks of a fake model's KV."""

    def step(self) -> bool:
        return self.loop.step()


def head_of(kind: str, runner: Runner) -> HeadFile:
    """sampled: other preferences than the target's; greedy: so sure of them that it always drafts its first;
    truncated: it knows three of the four ids."""
    head = random_head(runner.spec, vocab=3 if kind == "truncated" else 0, seed=1)
    scale = 60.0 if kind == "greedy" else 1.0
    return replace(head, w_out=quantize(scale * head.w_out.dequantize(), "F32"))


def truth(runner: Runner, top_k: int) -> dict[tuple[int, ...], float]:
    """Exact probability of every output, from the target's scores of all ids."""
    params = SamplingParams(temperature=0.0, logprobs=VOCAB)

    def chances(output: tuple[int, ...]) -> np.ndarray:
        ids = [*PROMPT, *output]
        piece = Slice(Sequence(99, 0, params, ids, len(PROMPT)), [0, 1], 0, len(ids))
        (score,) = runner.execute([piece])[0].scores or ()
        logits = np.full(VOCAB, -np.inf)
        logits[list(score.top_ids)] = np.array(score.top_logprobs) / TEMPERATURE
        if top_k:
            logits[np.argsort(-logits)[top_k:]] = -np.inf
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    found = {}
    for output in itertools.product(range(VOCAB), repeat=LENGTH):
        found[output] = math.prod(float(chances(output[:step])[token]) for step, token in enumerate(output))
    assert sum(found.values()) == pytest.approx(1.0)
    return found


def outputs(runner: Runner, head: HeadFile, top_k: int) -> Counter[tuple[int, ...]]:
    """RUNS outputs, sixteen at a time, each in as many steps as its drafts need."""
    speculation = eager(HeadProposer(head, runner), VOCAB, rejection=True, most=2)
    h = Sampled(runner, SchedulerConfig(16, 256, 64, "fcfs", 10.0), speculation)  # type: ignore[arg-type]
    requests = []
    for start in range(0, RUNS, 16):
        for seed in range(start, start + 16):
            params = SamplingParams(temperature=TEMPERATURE, top_k=top_k, seed=seed * 7919 + 1)
            # Two more than are looked at, so that the last ones can be drafts as well.
            requests.append(h.add(PROMPT, LENGTH + 2, params=params))
        h.finish()
    stats = speculation.stats
    assert stats.errors == 0 and 0 < stats.accepted < stats.proposed and stats.proposed > RUNS / 2
    return Counter(tuple(h.results[request].outputs[0][:LENGTH]) for request in requests)


def deviations(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-squared, standardised: about normal with mean 0 and deviation 1. Rare outputs are pooled."""
    assert all(expected[output] > 0 for output in counts)
    common = {output: p for output, p in expected.items() if p * RUNS >= 5}
    rest = 1 - sum(common.values())
    found = sum((counts[output] - RUNS * p) ** 2 / (RUNS * p) for output, p in common.items())
    freedom = len(common) - 1
    if rest * RUNS >= 5:
        seen = RUNS - sum(counts[output] for output in common)
        found += (seen - RUNS * rest) ** 2 / (RUNS * rest)
        freedom += 1
    return float((found - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("top_k", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["sampled", "greedy", "truncated"])
def test_outputs_have_the_targets_distribution(runner: Runner, kind: str, top_k: int) -> None:
    """top_k truncates target and drafts alike."""
    expected = truth(runner, top_k)
    assert sum(p > 0.01 for p in expected.values()) > 12, "a target that is sure of itself shows nothing"
    assert deviations(outputs(runner, head_of(kind, runner), top_k), expected) < CRITICAL


@pytest.mark.parametrize("kind", ["sampled", pytest.param("truncated", marks=pytest.mark.slow)])
def test_shared_noise_is_found_out(runner: Runner, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself is tested: drafts drawn with the verifier's noise shift the distribution, and it shows."""
    original = noise.gumbel

    def planted(seeds, positions, ids, choices, purpose=Purpose.SAMPLE):  # type: ignore[no-untyped-def]
        return original(seeds, positions, ids, choices, Purpose.ACCEPT if purpose is Purpose.DRAFT else purpose)

    expected = truth(runner, 0)
    monkeypatch.setattr(noise, "gumbel", planted)
    assert deviations(outputs(runner, head_of(kind, runner), 0), expected) > CRITICAL


@pytest.mark.slow
def test_drafts_held_back_by_what_they_are_are_found_out(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far a chain goes may not depend on what was drawn: here only likely drafts are run, and it shows."""
    expected = truth(runner, 0)

    def likely_only(self: HeadProposer, runs: list, goes_on: object = None) -> None:  # type: ignore[type-arg]
        original(self, runs)
        for run in runs:
            if run.rejection and run.claims[0] < 0.4:
                run.ids.clear()
                run.claims.clear()
                run.distributions.clear()

    original = HeadProposer.draft
    monkeypatch.setattr(HeadProposer, "draft", likely_only)
    assert deviations(outputs(runner, head_of("sampled", runner), 0), expected) > CRITICAL
