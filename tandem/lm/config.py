"""ModelConfig: the shape of a decoder-only model, from GGUF metadata or from a checkpoint's config.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class UnsupportedModel(ValueError):
    """A model that this path cannot run rightly; the message says why."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `kind` is default, linear, llama3 or yarn; the rest are that kind's parameters."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Multiplies cos and sin; None: yarn's own rule.
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """All that the native family needs to know. Sizes are in elements, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig = field(default_factory=RopeConfig)
    # Rope of sliding layers where it differs (Gemma 3).
    rope_local: RopeConfig | None = None
    # Share of head_dim that is rotated.
    rotary_dim: int = 0
    tied_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # RMS norm over each head of q and k (Qwen3, Gemma 3).
    qk_norm: bool = False
    # silu or gelu_tanh.
    activation: str = "silu"
    # Scale of attention scores; 0: head_dim ** -0.5.
    attention_scale: float = 0.0
    # Window per layer, 0 = full attention. Empty: full everywhere.
    windows: tuple[int, ...] = ()
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    # Norm weights are stored as w and used as 1 + w (Gemma).
    norm_plus_one: bool = False
    # Norms after attention and MLP besides those before (Gemma 2, 3).
    sandwich_norms: bool = False
    # Multipliers: embeddings after lookup, each residual branch, logits (divided).
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    # Divide the chosen experts' weights by their sum.
    normalize_expert_weights: bool = True
    # Layers without rope (SmolLM3), one flag per layer; empty: rope everywhere.
    no_rope_layers: tuple[bool, ...] = ()
    # Stored dtype of the checkpoint, for dtype auto.
    torch_dtype: str = "float32"
    # awq or gptq with its parameters; None: not quantised.
    quantization: tuple[tuple[str, Any], ...] | None = None

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5

    def window(self, layer: int) -> int:
        """Sliding window of a layer in tokens, itself included; 0: all."""
        return self.windows[layer] if self.windows else 0

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Rope of a layer; None: no rotation."""
        if self.no_rope_layers and self.no_rope_layers[layer]:
            return None
        return self.rope_local if self.rope_local is not None and self.window(layer) else self.rope
