"""Small random models of each native family against transformers in fp32."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tandem.lm.config import UnsupportedModel
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import Runner, SamplingParams, Sequence, Slice
from tests.lm.driver import Driver, Job

TOLERANCE = 2e-4
VOCAB = 320

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-bias": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3Text", {"sliding_window": 24, "query_pre_attn_scalar": 32}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **EXPERTS}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 32, "norm_topk_prob": True, **EXPERTS}),
}


def make(name: str, path: Path, **changes: Any) -> torch.nn.Module:
    """Saves a random checkpoint of the family and returns the model."""
    stem, extra = FAMILIES[name]
    model_class = getattr(transformers, f"{'Gemma3' if stem == 'Gemma3Text' else stem}ForCausalLM")
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{stem}Config")(**(SMALL | extra | changes))
    model = model_class(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            # Norms and biases start as ones and zeros, where a wrong name would not show.
            if key.endswith(("norm.weight", ".bias")):
                value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(path)
    return model


def load(path: Path, **extra: Any) -> Runner:
    settings = {"numerics": "exact", "kernels": "torch", "threads": 1, "kv_cache_bytes": 4 << 20} | extra
    return load_runner(RunnerSettings(path, **settings))


def all_logits(runner: Runner, prompt: list[int], chunk: int) -> np.ndarray:
    """Logprobs of the prompt's tokens, from prompt scores over chunks, with all alternatives: [len - 1, vocab]."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=VOCAB)
    sequence = Sequence(1, 0, params, prompt, len(prompt))
    table = list(range(-(-len(prompt) // runner.spec.block_size)))
    out = np.zeros((len(prompt) - 1, VOCAB))
    row = 0
    for start in range(0, len(prompt), chunk):
        count = min(chunk, len(prompt) - start)
        output = runner.execute([Slice(sequence, table, start, count, sample=False, score_prompt=True)])[0]
        for score in output.prompt_scores or []:
            out[row, list(score.top_ids)] = score.top_logprobs
            row += 1
    assert row == len(prompt) - 1
    return out


@pytest.mark.parametrize("name", list(FAMILIES))
def test_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    runner = load(tmp_path)
    prompt = np.random.default_rng(3).integers(3, VOCAB, size=75).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)[:-1].numpy()
    for chunk in (75, 31):
        assert np.abs(all_logits(runner, prompt, chunk) - expected).max() < TOLERANCE
    job, mate = Job(prompt, SamplingParams(temperature=0.0), 6), Job(prompt[:9], SamplingParams(temperature=0.0), 6)
    Driver(runner).run([mate, job])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + job.output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == job.output


@pytest.mark.parametrize("name", [name for name in FAMILIES if "mixtral" not in name and "moe" not in name])
def test_compiled_kernels_agree(name: str, tmp_path: Path) -> None:
    cpu = pytest.importorskip("kernels.cpu")
    if not cpu.available():
        pytest.skip(cpu.reason())
    model = make(name, tmp_path)
    runner = load(tmp_path, kernels="native")
    prompt = np.random.default_rng(3).integers(3, VOCAB, size=75).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)[:-1].numpy()
    assert np.abs(all_logits(runner, prompt, 31) - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_take_the_torch_path_and_say_so(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(name, tmp_path)
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        load(tmp_path, kernels="native")
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, kernels="auto").spec.kernel_path == "cpu/torch"
    assert "on the torch path" in caplog.text


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_batch_is_refused(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(**(SMALL | {"rope_parameters": rope}))
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="longest request"):
        load(tmp_path)
