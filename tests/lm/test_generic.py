"""Architectures that only the transformers path runs, against transformers itself; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.lm.config import UnsupportedModel
from tandem.lm.types import SamplingParams
from tests.lm.driver import Driver, Job
from tests.lm.test_families import SMALL, TOLERANCE, VOCAB, all_logits, load

EXPERTS = {"num_experts_per_tok": 2}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_inner": 96}
# name → config class stem, extra config, bitwise batch-invariant.
GENERIC: dict[str, tuple[str, dict[str, Any], bool]] = {
    "phi3": ("Phi3", {}, True),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}, True),
    "gpt_neox": ("GPTNeoX", {}, True),
    "gpt2": ("GPT2", GPT2, True),
    "nemotron": ("Nemotron", {}, True),
    "olmo": ("Olmo", {}, True),
    "olmo2": ("Olmo2", {}, True),
    "cohere": ("Cohere", {}, True),
    "starcoder2": ("Starcoder2", {"sliding_window": 24}, True),
    "glm": ("Glm", {}, True),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}, True),
    "exaone4": ("Exaone4", {"sliding_window": 24, "sliding_window_pattern": 3}, True),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "sliding_window": 24, **EXPERTS}, False),
    "olmoe": ("Olmoe", {"num_experts": 4, **EXPERTS}, False),
    # Native architectures run here too.
    "llama": ("Llama", {}, True),
}


def make(name: str, path: Path) -> torch.nn.Module:
    stem, extra, _ = GENERIC[name]
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{stem}Config")(**(SMALL | extra))
    suffix = "LMHeadModel" if stem == "GPT2" else "ForCausalLM"
    model = getattr(transformers, stem + suffix)(config).eval()
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("name", list(GENERIC))
def test_logits_and_tokens(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    runner = load(tmp_path, model_impl="transformers")
    assert runner.spec.kernel_path == "cpu/transformers"
    prompt = np.random.default_rng(3).integers(3, VOCAB, size=75).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)[:-1].numpy()
    for chunk in (75, 31):
        assert np.abs(all_logits(runner, prompt, chunk) - expected).max() < TOLERANCE
    assert runner.spec.batch_invariant == GENERIC[name][2]
    params = SamplingParams(temperature=1.0, seed=9, logprobs=2)
    alone, again = Job(prompt, params, 6), Job(prompt, params, 6)
    Driver(runner).run([alone])
    Driver(runner).run([Job(prompt[:9], params, 6), again], chunk=29, propose=lambda tokens: (5, 6))
    assert again.output == alone.output
    if runner.spec.batch_invariant:
        assert again.scores == alone.scores


def test_unknown_architecture_takes_the_generic_path(tmp_path: Path) -> None:
    make("olmo2", tmp_path)
    assert load(tmp_path).spec.kernel_path == "cpu/transformers"


def refused(config: Any, model_class: Any, path: Path, reason: str) -> None:
    model_class(config).save_pretrained(path)
    with pytest.raises(UnsupportedModel, match=reason):
        load(path, model_impl="transformers")


def test_recurrent_state_is_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8)
    refused(config, transformers.MambaForCausalLM, tmp_path, "attention")


def test_attention_of_its_own_is_refused(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    refused(config, transformers.BloomForCausalLM, tmp_path, "attention code of its own")


def test_dynamic_rope_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    config = transformers.Olmo2Config(**(SMALL | {"rope_parameters": rope}))
    refused(config, transformers.Olmo2ForCausalLM, tmp_path, "longest request")


def test_pickled_checkpoints_are_never_read(tmp_path: Path) -> None:
    model = make("phi3", tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="pickled"):
        load(tmp_path)
