"""GGUF files written by the tests: equal to the safetensors checkpoint, and block formats against own unpackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tandem.lm.types import SamplingParams
from tandem.lm.weights import WeightError, open_source
from tests.lm.driver import Driver, Job
from tests.lm.reference import unpack_q4_1, unpack_q8_0
from tests.lm.test_families import VOCAB, load, make

# Family → GGUF architecture; whether q and k rows are stored for interleaved RoPE, and norms with Gemma's 1 added.
ARCHITECTURES = {
    "llama": ("llama", True, False),
    "llama-tied-bias": ("llama", True, False),
    "llama-3.1": ("llama", True, False),
    "qwen2": ("qwen2", False, False),
    "qwen3": ("qwen3", False, False),
    "gemma": ("gemma", False, True),
    "gemma2": ("gemma2", False, True),
    "gemma3": ("gemma3", False, True),
    "granite": ("granite", True, False),
    "mistral-window": ("llama", True, False),
    "smollm3": ("smollm3", True, False),
    "mixtral": ("llama", True, False),
    "qwen3-moe": ("qwen3moe", False, False),
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleave(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows from half-split to interleaved RoPE order, as llama.cpp's converter stores them."""
    return value.reshape(heads, 2, len(value) // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)


def write_metadata(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    rope = config.rope_parameters
    theta = rope.get("full_attention", rope).get("rope_theta")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(config.vocab_size)
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_attention_scale(config.attention_multiplier)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if arch == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def convert(name: str, model: torch.nn.Module, path: Path) -> Path:
    """Writes the model's weights as an F32 GGUF file."""
    arch, permuted, plus_one = ARCHITECTURES[name]
    config: Any = model.config
    names = LAYER_NAMES | (SANDWICH if arch in ("gemma2", "gemma3") else {})
    writer = gguf.GGUFWriter(path, arch)
    write_metadata(writer, arch, config)
    for key, parameter in model.state_dict().items():
        value = parameter.numpy()
        stem, _, part = key.rpartition(".")
        if plus_one and "norm" in stem:
            value = value + 1
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if stem in GLOBAL:
            writer.add_tensor(f"{GLOBAL[stem]}.{part}", value)
            continue
        _, _, layer, inner = stem.split(".", 3)
        if part == "gate_up_proj":
            half = value.shape[1] // 2
            writer.add_tensor(f"blk.{layer}.ffn_gate_exps.weight", np.ascontiguousarray(value[:, :half]))
            writer.add_tensor(f"blk.{layer}.ffn_up_exps.weight", np.ascontiguousarray(value[:, half:]))
        elif part == "down_proj":
            writer.add_tensor(f"blk.{layer}.ffn_down_exps.weight", value)
        else:
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            if permuted and inner in heads:
                value = np.ascontiguousarray(interleave(value, heads[inner]))
            writer.add_tensor(f"blk.{layer}.{names[inner]}.{part}", value)
    if name == "llama-3.1":
        # The converter writes Llama 3.1's scaling as divisors of the frequencies.
        base = 1.0 / (config.rope_parameters["rope_theta"] ** (np.arange(0, 16, 2, dtype=np.float32) / 16))
        writer.add_tensor("rope_freqs.weight", (base / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path


# What a file of the architecture does not store, and means as given here.
UNTOLD: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "mistral-window": {"sliding_window": None},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_file_equals_safetensors(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path, **UNTOLD.get(name, {}))
    file = convert(name, model, tmp_path / "model.gguf")
    prompt = np.random.default_rng(3).integers(3, VOCAB, size=60).tolist()
    jobs = []
    for path in (tmp_path, file):
        job = Job(prompt, SamplingParams(temperature=0.0, logprobs=4), 8)
        Driver(load(path)).run([job])
        jobs.append(job)
    assert jobs[0].output == jobs[1].output
    if name != "llama-3.1":
        assert jobs[0].scores == jobs[1].scores
    else:
        # A quotient of frequencies, multiplied back, rounds differently.
        pairs = zip(jobs[0].scores, jobs[1].scores, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-4


def halves(data: np.ndarray, at: int) -> np.ndarray:
    """fp16 at a byte offset of each block, fp32 [..., 1]."""
    return data[..., at : at + 2].copy().view(np.float16).astype(np.float32)


def bits(data: np.ndarray, count: int) -> np.ndarray:
    """Bytes to fields of `count` bits, lowest field first: [..., bytes, 8 / count]."""
    shifts = np.arange(0, 8, count)
    return (data[..., None] >> shifts) & ((1 << count) - 1)


def low_high(data: np.ndarray) -> np.ndarray:
    """Nibbles: all low ones, then all high ones."""
    return np.concatenate([data & 15, data >> 4], axis=-1).astype(np.float32)


def fifth_bits(data: np.ndarray) -> np.ndarray:
    """Four bytes to 32 bits, in order."""
    return bits(data, 1).reshape(*data.shape[:-1], 32).astype(np.float32)


def unpack_q4_0(b: np.ndarray) -> np.ndarray:
    return (low_high(b[..., 2:]) - 8) * halves(b, 0)


def unpack_q5_0(b: np.ndarray) -> np.ndarray:
    return (low_high(b[..., 6:]) + 16 * fifth_bits(b[..., 2:6]) - 16) * halves(b, 0)


def unpack_q5_1(b: np.ndarray) -> np.ndarray:
    return (low_high(b[..., 8:]) + 16 * fifth_bits(b[..., 4:8])) * halves(b, 0) + halves(b, 2)


def scales_k4(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twelve bytes to eight 6-bit scales and eight 6-bit minima."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    least = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scale.astype(np.float32), least.astype(np.float32)


def unpack_q4_k(b: np.ndarray) -> np.ndarray:
    scale, least = scales_k4(b[..., 4:16])
    # 32 bytes hold two groups of 32: low nibbles, then high.
    values = low_high(b[..., 16:144].reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32)
    out = halves(b, 0)[..., None] * scale[..., None] * values - halves(b, 2)[..., None] * least[..., None]
    return out.reshape(*b.shape[:-1], 256)


def unpack_q5_k(b: np.ndarray) -> np.ndarray:
    scale, least = scales_k4(b[..., 4:16])
    values = low_high(b[..., 48:176].reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32)
    # Bit g of byte i is the fifth bit of element i of group g.
    fifth = np.moveaxis(bits(b[..., 16:48], 1), -1, -2)
    values = values + 16 * fifth
    out = halves(b, 0)[..., None] * scale[..., None] * values - halves(b, 2)[..., None] * least[..., None]
    return out.reshape(*b.shape[:-1], 256)


def unpack_q6_k(b: np.ndarray) -> np.ndarray:
    lead = b.shape[:-1]
    low = b[..., 0:128].reshape(*lead, 2, 64)
    high = b[..., 128:192].reshape(*lead, 2, 32)
    # Half by half, 128 elements: four rows of 32 with their two high bits in one byte.
    rows = np.stack([low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4], axis=-2)
    top = np.moveaxis(bits(high, 2), -1, -2)
    values = (rows | (top << 4)).astype(np.float32) - 32
    scale = b[..., 192:208].copy().view(np.int8).astype(np.float32)
    out = values.reshape(*lead, 16, 16) * scale[..., None] * halves(b, 208)[..., None]
    return out.reshape(*lead, 256)


def two_bit_rows(data: np.ndarray) -> np.ndarray:
    """64 bytes to 256 two-bit values: each 32 bytes are four rows of 32, lowest bits first."""
    lead = data.shape[:-1]
    return np.moveaxis(bits(data.reshape(*lead, 2, 32), 2), -1, -2).reshape(*lead, 16, 16).astype(np.float32)


def unpack_q2_k(b: np.ndarray) -> np.ndarray:
    scale, least = (b[..., 0:16] & 15).astype(np.float32), (b[..., 0:16] >> 4).astype(np.float32)
    values = two_bit_rows(b[..., 16:80])
    out = halves(b, 80)[..., None] * scale[..., None] * values - halves(b, 82)[..., None] * least[..., None]
    return out.reshape(*b.shape[:-1], 256)


def unpack_q3_k(b: np.ndarray) -> np.ndarray:
    lead = b.shape[:-1]
    # Bit r of byte i of the mask: row r (of eight rows of 32), element i; absent means minus four.
    mask = np.moveaxis(bits(b[..., 0:32], 1), -1, -2).reshape(*lead, 16, 16)
    values = two_bit_rows(b[..., 32:96]) - 4 * (1 - mask.astype(np.float32))
    low, high = b[..., 96:104], b[..., 104:108]
    nibbles = np.concatenate([low & 15, low >> 4], axis=-1)
    top = np.moveaxis(bits(high, 2), -1, -2).reshape(*lead, 16)
    scale = (nibbles | (top << 4)).astype(np.float32) - 32
    return (halves(b, 108)[..., None] * scale[..., None] * values).reshape(*lead, 256)


# Type → (block bytes, elements, byte offsets of fp16 fields, unpacker of [rows, blocks, bytes]).
FORMATS: dict[str, tuple[int, int, tuple[int, ...], Any]] = {
    "Q4_0": (18, 32, (0,), unpack_q4_0),
    "Q4_1": (20, 32, (0, 2), lambda b: unpack_q4_1(b.reshape(len(b), -1))),
    "Q5_0": (22, 32, (0,), unpack_q5_0),
    "Q5_1": (24, 32, (0, 2), unpack_q5_1),
    "Q8_0": (34, 32, (0,), lambda b: unpack_q8_0(b.reshape(len(b), -1))),
    "Q2_K": (84, 256, (80, 82), unpack_q2_k),
    "Q3_K": (110, 256, (108,), unpack_q3_k),
    "Q4_K": (144, 256, (0, 2), unpack_q4_k),
    "Q5_K": (176, 256, (0, 2), unpack_q5_k),
    "Q6_K": (210, 256, (208,), unpack_q6_k),
}


@pytest.mark.parametrize("kind", list(FORMATS))
def test_block_formats(kind: str, tmp_path: Path) -> None:
    size, elements, scales, unpack = FORMATS[kind]
    rng = np.random.default_rng(len(kind) + size)
    rows, columns = 64, 1024
    blocks = rng.integers(0, 256, size=(rows, columns // elements, size), dtype=np.uint8)
    for at in scales:
        values = rng.uniform(-0.02, 0.02, size=blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    for key, value in (("block_count", 1), ("context_length", 64), ("embedding_length", columns)):
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_uint32("qwen2.attention.head_count", 8)
    writer.add_vocab_size(rows)
    writer.add_tensor("token_embd.weight", blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    source = open_source(tmp_path / "model.gguf")
    expected = unpack(blocks).reshape(rows, columns)
    found = source.tensor("embed.weight", torch.float32).numpy()
    assert found.shape == expected.shape
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    file = convert("qwen3", make("qwen3", tmp_path), tmp_path / "model.gguf")
    whole = file.read_bytes()
    for length in (len(whole) - 100, len(whole) // 2, 200):
        cut = tmp_path / f"cut-{length}.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(WeightError, match=cut.name):
            open_source(cut)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = make("qwen3", tmp_path)
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    model.state_dict = lambda: state  # type: ignore[method-assign]
    file = convert("qwen3", model, tmp_path / "model.gguf")
    with pytest.raises(WeightError, match=r"blk\.1\.ffn_up\.weight is missing"):
        load(file)
