"""ModelConfig from a checkpoint's config.json (Hugging Face names)."""

from __future__ import annotations

from typing import Any

from tandem.lm.config import ModelConfig, RopeConfig, UnsupportedModel

# config.json's model_type → what differs from plain Llama.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "gemma": {"norm_plus_one": True, "activation": "gelu_tanh", "tied_embeddings": True},
    "gemma2": {"norm_plus_one": True, "activation": "gelu_tanh", "sandwich_norms": True, "tied_embeddings": True},
    "gemma3_text": {
        "norm_plus_one": True,
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "qk_norm": True,
        "tied_embeddings": True,
    },
    "granite": {},
    "smollm3": {},
}

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Defaults of transformers' config classes: a saved config.json may leave out what equals them.
_THETA_DEFAULTS = {"mixtral": 1e6, "smollm3": 2e6, "gemma3_text": 1e6}


def supports(config: dict[str, Any]) -> bool:
    """Whether the native family knows this model_type."""
    return config.get("model_type") in _FAMILIES


def rope_from(parameters: dict[str, Any], max_position: int, default_theta: float = 10_000.0) -> RopeConfig:
    """Reads transformers' rope_parameters (or the older rope_scaling).

    Raises:
        UnsupportedModel: unknown, or of frequencies that depend on the batch's longest request (dynamic, longrope).
    """
    kind = parameters.get("rope_type", parameters.get("type", "default")) or "default"
    if kind in ("dynamic", "longrope", "su"):
        raise UnsupportedModel(
            f"rope_type {kind!r} changes its frequencies with the longest request of a batch, "
            "so one request would change its neighbours' answers"
        )
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedModel(f"rope_type {kind!r} is unknown; known: default, linear, llama3, yarn")
    original = int(parameters.get("original_max_position_embeddings") or max_position)
    factor = parameters.get("factor")
    attention_factor = parameters.get("attention_factor")
    if kind == "yarn":
        if factor is None:
            factor = max_position / original
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if attention_factor is None and mscale and mscale_all:
            attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return RopeConfig(
        theta=float(parameters.get("rope_theta") or default_theta),
        kind=kind,
        factor=float(factor if factor is not None else 1.0),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        truncate=bool(parameters.get("truncate", True)),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: 0.1 · mscale · ln(factor) + 1 (Peng et al. 2023, eq. 22)."""
    import math

    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window")
    kinds = config.get("layer_types")
    model_type = config["model_type"]
    if not window:
        return ()
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)
    if model_type == "gemma2":
        return tuple(int(window) if (layer + 1) % 2 else 0 for layer in range(layers))
    if model_type == "gemma3_text":
        pattern = int(config.get("sliding_window_pattern") or 6)
        return tuple(int(window) if (layer + 1) % pattern else 0 for layer in range(layers))
    if model_type in ("qwen2", "qwen3", "qwen3_moe", "smollm3"):
        if not config.get("use_sliding_window", False):
            return ()
        first = int(config.get("max_window_layers", 28))
        return tuple(int(window) if layer >= first else 0 for layer in range(layers))
    return (int(window),) * layers


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """Builds the config of a native model.

    Raises:
        UnsupportedModel: an architecture, activation or rope that the native family cannot run rightly.
    """
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise UnsupportedModel(f"model_type {model_type!r} is not native; known: {', '.join(sorted(_FAMILIES))}")
    family = dict(_FAMILIES[model_type])
    activation = config.get("hidden_activation") or config.get("hidden_act") or family.get("activation", "silu")
    if model_type.startswith("gemma"):
        activation = "gelu_pytorch_tanh"
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {activation!r} is not native; known: {', '.join(_ACTIVATIONS)}")
    family["activation"] = _ACTIVATIONS[activation]
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    layers = int(config["num_hidden_layers"])
    max_position = int(config.get("max_position_embeddings", 2048))
    ropes = _ropes(config, max_position)
    partial = float(config.get("partial_rotary_factor") or 1.0)
    bias = bool(config.get("attention_bias", family.pop("attention_bias", False)))
    if model_type == "qwen2":
        bias = True
    family["tied_embeddings"] = bool(config.get("tie_word_embeddings", family.get("tied_embeddings", False)))
    extras = _extras(config, model_type, hidden, layers)
    return ModelConfig(
        architecture=(config.get("architectures") or [model_type])[0],
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=int(config.get("intermediate_size") or 0),
        max_position=max_position,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=ropes[0],
        rope_local=ropes[1],
        rotary_dim=int(head_dim * partial),
        attention_bias=bias,
        output_bias=bias and model_type in ("llama", "granite", "smollm3", "qwen3", "qwen3_moe", "gemma", "gemma2"),
        mlp_bias=bool(config.get("mlp_bias", False)),
        windows=_windows(config, layers),
        attention_softcap=float(config.get("attn_logit_softcapping") or 0.0),
        logit_softcap=float(config.get("final_logit_softcapping") or 0.0),
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        quantization=_quantization(config),
        **extras,
        **family,
    )


def _ropes(config: dict[str, Any], max_position: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Global rope and, for Gemma 3, that of sliding layers."""
    model_type = config["model_type"]
    theta = float(config.get("rope_theta") or _THETA_DEFAULTS.get(model_type, 10_000.0))
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in parameters:
        local = parameters.get("sliding_attention") or {}
        return rope_from(parameters["full_attention"], max_position, theta), rope_from(local, max_position)
    local_theta = config.get("rope_local_base_freq")
    if model_type == "gemma3_text" and local_theta is None:
        local_theta = 10_000.0
    local_rope = RopeConfig(theta=float(local_theta)) if local_theta else None
    return rope_from(parameters, max_position, theta), local_rope


def _extras(config: dict[str, Any], model_type: str, hidden: int, layers: int) -> dict[str, Any]:
    """Scales and experts of the families that have them."""
    extras: dict[str, Any] = {}
    if model_type.startswith("gemma"):
        extras["embedding_scale"] = hidden**0.5
        if model_type != "gemma":
            extras["attention_scale"] = float(config.get("query_pre_attn_scalar", 256)) ** -0.5
    if model_type == "granite":
        extras["embedding_scale"] = float(config.get("embedding_multiplier", 1.0))
        extras["residual_scale"] = float(config.get("residual_multiplier", 1.0))
        extras["logit_divisor"] = float(config.get("logits_scaling", 1.0))
        extras["attention_scale"] = float(config.get("attention_multiplier", 1.0))
    if model_type == "smollm3" and config.get("no_rope_layers"):
        # The checkpoint's flags say where rope IS used.
        extras["no_rope_layers"] = tuple(not bool(flag) for flag in config["no_rope_layers"])
    if model_type == "mixtral":
        extras["num_experts"] = int(config.get("num_local_experts", 8))
        extras["experts_per_token"] = int(config.get("num_experts_per_tok", 2))
        extras["expert_intermediate_size"] = int(config["intermediate_size"])
    if model_type == "qwen3_moe":
        if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step", 1)) != 1:
            raise UnsupportedModel("qwen3_moe with dense layers among its expert layers is not native")
        extras["num_experts"] = int(config.get("num_experts", config.get("num_local_experts", 128)))
        extras["experts_per_token"] = int(config.get("num_experts_per_tok", 8))
        extras["expert_intermediate_size"] = int(config["moe_intermediate_size"])
        extras["normalize_expert_weights"] = bool(config.get("norm_topk_prob", False))
    return extras


def _quantization(config: dict[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """AWQ or GPTQ parameters, as sorted pairs.

    Raises:
        UnsupportedModel: another method, or a variant of these that is not 4-bit group quantisation.
    """
    found = config.get("quantization_config")
    if not found:
        return None
    method = found.get("quant_method")
    if method not in ("awq", "gptq"):
        raise UnsupportedModel(f"quant_method {method!r} is unknown; known: awq, gptq")
    bits = int(found.get("bits", found.get("w_bit", 4)))
    if bits != 4:
        raise UnsupportedModel(f"{method} with {bits} bits is not supported; only 4 bits are")
    if method == "awq" and str(found.get("version", "gemm")).lower() != "gemm":
        raise UnsupportedModel(f"awq version {found.get('version')!r} is not supported; only gemm is")
    values = {
        "method": method,
        "group_size": int(found.get("group_size", found.get("q_group_size", 128))),
        "checkpoint_format": str(found.get("checkpoint_format", "gptq")),
    }
    return tuple(sorted(values.items()))
