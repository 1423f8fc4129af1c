"""Independent references: GGUF blocks unpacked by their layout, and transformers models filled with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def unpack_q4_1(data: np.ndarray) -> np.ndarray:
    """Blocks of 32: fp16 scale, fp16 minimum, 16 bytes; low nibbles are elements 0 to 15, high ones 16 to 31."""
    blocks = data.reshape(data.shape[0], -1, 20)
    scale = blocks[..., 0:2].copy().view(np.float16).astype(np.float32)
    least = blocks[..., 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1).astype(np.float32)
    return (nibbles * scale + least).reshape(data.shape[0], -1)


def unpack_q8_0(data: np.ndarray) -> np.ndarray:
    """Blocks of 32: fp16 scale, 32 int8."""
    blocks = data.reshape(data.shape[0], -1, 34)
    scale = blocks[..., 0:2].copy().view(np.float16).astype(np.float32)
    return (blocks[..., 2:].copy().view(np.int8).astype(np.float32) * scale).reshape(data.shape[0], -1)


def _values(tensor: Any) -> torch.Tensor:
    kind = tensor.tensor_type.name
    if kind == "F32":
        return torch.from_numpy(np.array(tensor.data))
    return torch.from_numpy({"Q4_1": unpack_q4_1, "Q8_0": unpack_q8_0}[kind](np.array(tensor.data)))


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of interleaved RoPE (pairs side by side) to half-split order."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return torch.cat([pairs[:, :, 0], pairs[:, :, 1]], dim=1).reshape(rows, columns)


def llama_from_gguf(path: Path) -> LlamaForCausalLM:
    """A transformers fp32 Llama with a GGUF file's weights."""
    reader = gguf.GGUFReader(path)

    def meta(key: str) -> Any:
        return reader.get_field(f"llama.{key}").contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=meta("embedding_length"),
        intermediate_size=meta("feed_forward_length"),
        num_hidden_layers=meta("block_count"),
        num_attention_heads=meta("attention.head_count"),
        num_key_value_heads=meta("attention.head_count_kv"),
        rms_norm_eps=meta("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": meta("rope.freq_base")},
        max_position_embeddings=meta("context_length"),
        tie_word_embeddings="output.weight" not in tensors,
    )
    state = {"model.embed_tokens.weight": _values(tensors["token_embd.weight"])}
    state["model.norm.weight"] = _values(tensors["output_norm.weight"])
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(config.num_hidden_layers):
        for short, name in names.items():
            value = _values(tensors[f"blk.{layer}.{short}.weight"])
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(short)
            state[f"model.layers.{layer}.{name}.weight"] = value if heads is None else _half_split(value, heads)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True, strict=True)
    # Buffers made on the meta device have no values: compute the rotary table anew.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
