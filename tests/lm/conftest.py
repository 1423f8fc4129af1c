"""Runners that many tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import Runner
from tandem.models.store import resolve


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The default model's GGUF file."""
    return resolve("smollm2-135m-instruct").path


@pytest.fixture(scope="session")
def smollm(smollm_path: Path) -> Runner:
    """The default model with exact numerics on the torch path."""
    return load_runner(
        RunnerSettings(smollm_path, numerics="exact", kernels="torch", threads=1, kv_cache_bytes=256 << 20)
    )


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small random Llama: 3 layers, 6 query and 2 KV heads, vocabulary 1,000."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
    )
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session", params=["torch-exact", "native-exact", "native-fast", "torch-bfloat16"])
def tiny(tiny_path: Path, request: pytest.FixtureRequest) -> Runner:
    """The small random Llama on each path."""
    kernels, mode = request.param.split("-")
    if kernels == "native":
        cpu = pytest.importorskip("kernels.cpu")
        if not cpu.available():
            pytest.skip(cpu.reason())
    return load_runner(
        RunnerSettings(
            tiny_path,
            numerics="exact" if mode == "exact" else "fast",
            dtype="bfloat16" if mode == "bfloat16" else "auto",
            kernels=kernels,
            threads=1,
            kv_cache_bytes=16 << 20,
        )
    )
