"""A model shared out over two processes against the same model in one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tandem.lm.config import UnsupportedModel
from tandem.lm.types import SamplingParams
from tests.lm.driver import Driver, Job
from tests.lm.test_families import VOCAB, load, make

PROMPT = np.random.default_rng(3).integers(3, VOCAB, size=40).tolist()
PARAMS = SamplingParams(temperature=1.0, seed=12, logprobs=3)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-tied-bias", {"num_attention_heads": 8, "num_key_value_heads": 4}),
        # One KV head for two ranks: replicated.
        pytest.param("qwen3-moe", {"num_key_value_heads": 1}, marks=pytest.mark.slow),
    ],
)
def test_two_processes(name: str, changes: dict[str, int], tmp_path: Path) -> None:
    make(name, tmp_path, **changes)
    single, whole = load(tmp_path), Job(PROMPT, PARAMS, 8)
    Driver(single).run([whole])
    shared = load(tmp_path, tensor_parallel_size=2)
    try:
        alone, again = Job(PROMPT, PARAMS, 8), Job(PROMPT, PARAMS, 8)
        driver = Driver(shared)
        driver.run([alone])
        driver.run([Job(PROMPT[:7], PARAMS, 8), again], chunk=23, propose=lambda tokens: (5, 6))
        vectors = shared.embed([PROMPT, PROMPT[:5]], "mean", normalize=True)
        assert np.abs(vectors - single.embed([PROMPT, PROMPT[:5]], "mean", normalize=True)).max() < 1e-4
    finally:
        shared.close()
    # Within one size bit for bit; between sizes sums round differently.
    assert again.output == alone.output and again.scores == alone.scores
    assert alone.output == whole.output
    assert max(abs(a.logprob - b.logprob) for a, b in zip(alone.scores, whole.scores, strict=True)) < 1e-4
    assert shared.spec.numerics_id != single.spec.numerics_id
    assert shared.spec.kernel_path == "cpu/torch/tp2"


@pytest.mark.parametrize(("size", "reason"), [(3, "attention heads"), (64, "attention heads")])
def test_sizes_that_do_not_divide_are_refused(size: int, reason: str, tmp_path: Path) -> None:
    make("llama", tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path, tensor_parallel_size=size)


@pytest.mark.slow
def test_a_dead_rank_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    make("llama", tmp_path)
    shared = load(tmp_path, tensor_parallel_size=2)
    process = shared._model._processes[0]  # type: ignore[attr-defined]
    process.kill()
    process.join(10)
    try:
        with pytest.raises(RuntimeError):
            Driver(shared).run([Job(PROMPT, PARAMS, 2)])
    finally:
        dist.destroy_process_group()
