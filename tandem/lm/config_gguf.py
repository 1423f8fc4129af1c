"""ModelConfig from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem.lm.config import ModelConfig, RopeConfig, UnsupportedModel

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3moe": {"qk_norm": True},
    # Gemma's norm weights are stored with their 1 already added.
    "gemma": {"activation": "gelu_tanh"},
    "gemma2": {"activation": "gelu_tanh", "sandwich_norms": True},
    "gemma3": {"activation": "gelu_tanh", "sandwich_norms": True, "qk_norm": True},
    "granite": {},
    "smollm3": {},
}


def from_gguf(metadata: Callable[[str], Any], has_tensor: Callable[[str], bool]) -> ModelConfig:
    """Builds the config. `metadata(key)` gives a value or None; `has_tensor(name)` tells what the file holds.

    Raises:
        UnsupportedModel: an architecture or rope that the native family cannot run rightly.
    """
    arch = metadata("general.architecture")
    if arch not in _FAMILIES:
        raise UnsupportedModel(f"GGUF architecture {arch!r} is not native; known: {', '.join(sorted(_FAMILIES))}")

    def need(key: str) -> Any:
        value = metadata(f"{arch}.{key}")
        if value is None:
            raise UnsupportedModel(f"GGUF metadata {arch}.{key} is missing")
        return value

    def get(key: str, default: Any) -> Any:
        value = metadata(f"{arch}.{key}")
        return default if value is None else value

    heads, hidden, layers = int(need("attention.head_count")), int(need("embedding_length")), int(need("block_count"))
    kv_heads = get("attention.head_count_kv", heads)
    if isinstance(kv_heads, list):
        raise UnsupportedModel("a different number of KV heads per layer is not native")
    head_dim = int(get("attention.key_length", hidden // heads))
    if int(get("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModel("value heads of another size than key heads are not native")
    tokens = metadata("tokenizer.ggml.tokens")
    experts = int(get("expert_count", 0))
    extras: dict[str, Any] = dict(_FAMILIES[arch])
    extras.update(_scales(arch, get, hidden, head_dim, layers))
    bias = has_tensor("blk.0.attn_q.bias")
    extras["attention_bias"] = bias
    extras["output_bias"] = has_tensor("blk.0.attn_output.bias")
    max_position = int(need("context_length"))
    return ModelConfig(
        architecture=arch,
        vocab_size=int(get("vocab_size", len(tokens) if tokens else 0)),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=head_dim,
        intermediate_size=int(get("feed_forward_length", 0)),
        max_position=max_position,
        norm_eps=float(get("attention.layer_norm_rms_epsilon", 1e-6)),
        rope=_rope(arch, get, max_position),
        rope_local=RopeConfig() if arch == "gemma3" else None,
        rotary_dim=int(get("rope.dimension_count", head_dim)),
        tied_embeddings=not has_tensor("output.weight"),
        mlp_bias=has_tensor("blk.0.ffn_up.bias"),
        attention_softcap=float(get("attn_logit_softcapping", 0.0)),
        logit_softcap=float(get("final_logit_softcapping", 0.0)),
        num_experts=experts,
        experts_per_token=int(get("expert_used_count", 0)),
        expert_intermediate_size=int(get("expert_feed_forward_length", get("feed_forward_length", 0)))
        if experts
        else 0,
        **extras,
    )


def _rope(arch: str, get: Callable[[str, Any], Any], max_position: int) -> RopeConfig:
    kind = str(get("rope.scaling.type", "none"))
    theta = float(get("rope.freq_base", 1e6 if arch == "gemma3" else 10_000.0))
    factor = float(get("rope.scaling.factor", 1.0))
    if kind in ("none", ""):
        # Old files have only the linear factor.
        factor = float(get("rope.scale_linear", 1.0))
        return RopeConfig(theta=theta, kind="linear" if factor != 1.0 else "default", factor=factor)
    original = int(get("rope.scaling.original_context_length", max_position))
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        return RopeConfig(theta=theta, kind="yarn", factor=factor, original_max_position=original)
    raise UnsupportedModel(f"GGUF rope scaling {kind!r} is unknown or depends on the batch; known: none, linear, yarn")


def _scales(arch: str, get: Callable[[str, Any], Any], hidden: int, head_dim: int, layers: int) -> dict[str, Any]:
    """Multipliers and windows of the families that have them."""
    found: dict[str, Any] = {}
    window = int(get("attention.sliding_window", 0) or 0)
    if arch.startswith("gemma"):
        found["embedding_scale"] = hidden**0.5
        if arch == "gemma2":
            found["windows"] = tuple(window if (layer + 1) % 2 else 0 for layer in range(layers)) if window else ()
            # 27B divides by hidden / heads, all others by the head dimension.
            found["attention_scale"] = (hidden / int(get("attention.head_count", 1))) ** -0.5 if layers == 46 else 0.0
        if arch == "gemma3":
            found["windows"] = tuple(window if (layer + 1) % 6 else 0 for layer in range(layers)) if window else ()
            found["attention_scale"] = (hidden / int(get("attention.head_count", 1))) ** -0.5 if layers == 62 else 0.0
    elif window:
        found["windows"] = (window,) * layers
    if arch == "granite":
        found["embedding_scale"] = float(get("embedding_scale", 1.0))
        found["residual_scale"] = float(get("residual_scale", 1.0))
        found["logit_divisor"] = float(get("logit_scale", 1.0))
        found["attention_scale"] = float(get("attention.scale", 0.0))
    if arch == "smollm3":
        found["no_rope_layers"] = tuple((layer + 1) % 4 == 0 for layer in range(layers))
    if arch == "qwen3moe":
        found["normalize_expert_weights"] = True
    return found
