"""Pooled hidden states against transformers; independence of the batch and of the step size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.lm.types import Runner
from tests.lm.test_families import VOCAB, load, make

PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, size=n).tolist() for n in (5, 1, 60, 17)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("embed")
    return path, make("qwen3", path)


@pytest.fixture(scope="module")
def runner(checkpoint: tuple[Path, torch.nn.Module]) -> Runner:
    return load(checkpoint[0])


def test_against_transformers(runner: Runner, checkpoint: tuple[Path, torch.nn.Module]) -> None:
    for pooling in ("mean", "last"):
        found = runner.embed(PROMPTS, pooling, normalize=False)
        for vector, prompt in zip(found, PROMPTS, strict=True):
            with torch.no_grad():
                states = checkpoint[1].model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
            expected = states.mean(0) if pooling == "mean" else states[-1]
            assert np.abs(vector - expected.numpy()).max() < 2e-4


def test_normalised(runner: Runner) -> None:
    assert np.allclose(np.linalg.norm(runner.embed(PROMPTS, "mean", normalize=True), axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_equal_bits_alone_and_in_small_steps(checkpoint: tuple[Path, torch.nn.Module], model_impl: str) -> None:
    large = load(checkpoint[0], model_impl=model_impl)
    together = large.embed(PROMPTS, "mean", normalize=True)
    small = load(checkpoint[0], model_impl=model_impl, max_num_batched_tokens=16, max_num_seqs=4)
    for index, prompt in enumerate(PROMPTS):
        assert np.array_equal(large.embed([prompt], "mean", normalize=True)[0], together[index])
        assert np.array_equal(small.embed([prompt], "mean", normalize=True)[0], together[index])


def test_bad_input_names_the_value(runner: Runner) -> None:
    with pytest.raises(ValueError, match="max"):
        runner.embed(PROMPTS, "max", normalize=True)
    with pytest.raises(ValueError, match="prompt 1 has 0 tokens"):
        runner.embed([[3], []], "mean", normalize=True)
    with pytest.raises(ValueError, match="513 tokens"):
        runner.embed([[3] * 513], "mean", normalize=True)
