"""The Llama family in plain torch: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Granite, SmolLM3, Mixtral, Qwen3-MoE.

Batch-invariant: every operation comes from tandem.lm.ops or tandem.lm.attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import torch

from tandem.lm import ops
from tandem.lm.attention import AttentionSpec, paged_attention
from tandem.lm.batch import KV, StepBatch
from tandem.lm.config import RopeConfig
from tandem.lm.kv import KVCache, KVShape, block_bytes, torch_dtype
from tandem.lm.models.moe import Experts
from tandem.lm.rope import RotaryTable, rotate
from tandem.lm.weights import WeightSource

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": ops.silu_, "gelu_tanh": ops.gelu_tanh_}


class Linear:
    """One matrix [out, in], or several with the same input stacked along out, and their biases."""

    def __init__(self, source: WeightSource, names: list[str], dtype: torch.dtype, device: torch.device) -> None:
        parts = [source.tensor(f"{name}.weight", dtype) for name in names]
        self.weight = parts[0].to(device) if len(parts) == 1 else torch.cat(parts).to(device)
        self.bias: torch.Tensor | None = None
        if any(source.has(f"{name}.bias") for name in names):
            biases = [
                source.tensor(f"{name}.bias", dtype) if source.has(f"{name}.bias") else torch.zeros(len(part)).to(dtype)
                for name, part in zip(names, parts, strict=True)
            ]
            self.bias = torch.cat(biases).to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.weight
        if self.bias is not None:
            yield self.bias


class Norm:
    """RMS norm; its weight is fp32, with Gemma's 1 added at load."""

    def __init__(self, source: WeightSource, name: str, eps: float, device: torch.device) -> None:
        self.weight = source.tensor(f"{name}.weight", torch.float32).to(device)
        # GGUF files hold Gemma's norms with the 1 added; there the flag is off.
        if source.config.norm_plus_one:
            self.weight = self.weight + 1.0
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class Attention:
    """Self-attention of one layer."""

    def __init__(self, source: WeightSource, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        config, stem = source.config, f"layers.{layer}"
        self.config, self.layer = config, layer
        self.qkv = Linear(source, [f"{stem}.{kind}" for kind in "qkv"], dtype, device)
        self.out = Linear(source, [f"{stem}.o"], dtype, device)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = Norm(source, f"{stem}.q_norm", config.norm_eps, device)
            self.k_norm = Norm(source, f"{stem}.k_norm", config.norm_eps, device)
        self.spec = AttentionSpec(config.scale, config.window(layer), config.attention_softcap)

    def __call__(
        self, x: torch.Tensor, batch: StepBatch, kv: KVCache, rope: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        config, rows = self.config, batch.rows
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        mixed = self.qkv(x).view(-1, heads + 2 * kv_heads, dim)
        query, key, value = mixed.split([heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if rope is not None:
            query, key = rotate(query, *rope), rotate(key, *rope)
        slots = _tensor(batch, "slots", x.device)
        kv.write(self.layer, slots // batch.block_size, slots % batch.block_size, key[:rows], value[:rows])
        mixed = paged_attention(query, kv.keys[self.layer], kv.values[self.layer], batch, self.spec)
        return self.out(mixed.view(-1, heads * dim))


class Mlp:
    """Gated MLP of one layer."""

    def __init__(self, source: WeightSource, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        stem = f"layers.{layer}"
        self.gate_up = Linear(source, [f"{stem}.gate", f"{stem}.up"], dtype, device)
        self.down = Linear(source, [f"{stem}.down"], dtype, device)
        self.activation = _ACTIVATIONS[source.config.activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate.contiguous()).mul_(up))


class Layer:
    """One decoder layer: norm, attention, norm, MLP or experts, with residuals."""

    def __init__(
        self,
        source: WeightSource,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        config, stem = source.config, f"layers.{layer}"
        self.residual_scale, self.reduce = config.residual_scale, reduce
        self.attn_norm = Norm(source, f"{stem}.attn_norm", config.norm_eps, device)
        self.mlp_norm = Norm(source, f"{stem}.mlp_norm", config.norm_eps, device)
        self.post_attn_norm = self.post_mlp_norm = None
        if config.sandwich_norms:
            self.post_attn_norm = Norm(source, f"{stem}.post_attn_norm", config.norm_eps, device)
            self.post_mlp_norm = Norm(source, f"{stem}.post_mlp_norm", config.norm_eps, device)
        self.attention = Attention(source, layer, dtype, device)
        self.mlp: Mlp | Experts = (
            Experts(source, layer, dtype, device, _ACTIVATIONS[config.activation])
            if config.num_experts
            else Mlp(source, layer, dtype, device)
        )

    def __call__(
        self, x: torch.Tensor, batch: StepBatch, kv: KVCache, rope: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        branch = self.attention(self.attn_norm(x), batch, kv, rope)
        x = self._add(x, branch, self.post_attn_norm)
        branch = self.mlp(self.mlp_norm(x))
        return self._add(x, branch, self.post_mlp_norm)

    def _add(self, x: torch.Tensor, branch: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        branch = branch if self.reduce is None else self.reduce(branch)
        branch = branch if norm is None else norm(branch)
        return x + (branch if self.residual_scale == 1.0 else branch * self.residual_scale)


class NativeModel:
    """Model over a WeightSource. Implements tandem.lm.batch.Model."""

    kernel_path = "cpu/torch"
    batch_invariant = True
    gives_hidden = True

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None] | None = None,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """reduce: adds up what several processes computed of one layer; None: this one computes all of it."""
        config = source.config
        self.config, self.dtype, self.device = config, dtype, device
        self.dtype_name = self.default_kv_dtype = str(dtype).removeprefix("torch.")
        if device.type != "cpu":
            self.kernel_path, self.batch_invariant = f"{device.type}/torch", False
        self.embedding = source.tensor("embed.weight", dtype).to(device)
        self.layers = []
        for layer in range(config.num_layers):
            self.layers.append(Layer(source, layer, dtype, device, reduce))
            if progress is not None:
                progress(layer + 1, config.num_layers)
        self.norm = Norm(source, "norm", config.norm_eps, device)
        tied = config.tied_embeddings or not source.has("head.weight")
        self.head = self.embedding if tied else source.tensor("head.weight", dtype).to(device)
        self._ropes = rotary_tables(source, device)
        self.weight_bytes = sum(tensor.nbytes for tensor in _all_tensors(self))
        # Numbers per row that live at once in the widest layer: states, heads, and the MLP's two halves twice.
        heads = 2 * config.num_heads + 2 * config.num_kv_heads
        self.row_width = 4 * config.hidden_size + heads * config.head_dim + 4 * config.intermediate_size

    def kv_block_bytes(self, block_size: int, kv_dtype: str) -> int:
        return block_bytes(self._kv_shapes(), block_size, kv_dtype)

    def new_kv(self, num_blocks: int, block_size: int, kv_dtype: str, max_rows: int) -> KVCache:
        return KVCache(self._kv_shapes(), num_blocks, block_size, torch_dtype(kv_dtype), self.device)

    def _kv_shapes(self) -> list[KVShape]:
        config = self.config
        return [KVShape(config.num_kv_heads, config.head_dim, config.head_dim)] * config.num_layers

    @torch.inference_mode()
    def _states(self, batch: StepBatch, kv: KV) -> torch.Tensor:
        """Final-norm hidden states of logit_rows, padded to the row tile."""
        positions = torch.from_numpy(batch.positions).to(self.device)
        largest = int(batch.positions.max())
        ropes = {rope: table.at(positions, largest) for rope, table in self._ropes.items()}
        x = self.embedding[torch.from_numpy(batch.token_ids).to(self.device)]
        if self.config.embedding_scale != 1.0:
            # Gemma rounds the factor to the activations' dtype.
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)
        for index, layer in enumerate(self.layers):
            rope = self.config.layer_rope(index)
            x = layer(x, batch, cast(KVCache, kv), None if rope is None else ropes[rope])
        return self.norm(ops.pad_rows(x[torch.from_numpy(batch.logit_rows).to(self.device)]))

    @torch.inference_mode()
    def logits(self, batch: StepBatch, kv: KV) -> np.ndarray:
        return self._project(self._states(batch, kv), len(batch.logit_rows))

    def _project(self, states: torch.Tensor, rows: int) -> np.ndarray:
        """Raw fp32 logits of the first `rows` states."""
        out = ops.linear(states, self.head).float()
        if self.config.logit_divisor != 1.0:
            out = out / self.config.logit_divisor
        if self.config.logit_softcap:
            out = ops.soft_cap_(out, self.config.logit_softcap)
        return out[:rows].cpu().numpy()

    @torch.inference_mode()
    def logits_and_hidden(self, batch: StepBatch, kv: KV) -> tuple[np.ndarray, np.ndarray]:
        states, rows = self._states(batch, kv), len(batch.logit_rows)
        return self._project(states, rows), states[:rows].float().cpu().numpy()

    @torch.inference_mode()
    def embedding_rows(self, ids: list[int]) -> np.ndarray:
        return self.embedding[torch.tensor(ids, dtype=torch.int64, device=self.device)].float().cpu().numpy()

    @torch.inference_mode()
    def hidden(self, batch: StepBatch, kv: KV) -> np.ndarray:
        return self._states(batch, kv)[: len(batch.logit_rows)].float().cpu().numpy()


def rotary_tables(source: WeightSource, device: torch.device) -> dict[RopeConfig, RotaryTable]:
    """One table per rope that some layer uses."""
    config = source.config
    divisors = source.tensor("rope_freqs.weight", torch.float32) if source.has("rope_freqs.weight") else None
    return {
        rope: RotaryTable(rope, config.rotary_dim, device, divisors)
        for rope in {config.layer_rope(layer) for layer in range(config.num_layers)}
        if rope is not None
    }


def _tensor(batch: StepBatch, name: str, device: torch.device) -> torch.Tensor:
    """An array of the batch on the device, converted once per step."""
    found = batch.cache.get(name)
    if found is None:
        array: np.ndarray = getattr(batch, name)
        found = batch.cache[name] = torch.from_numpy(array).to(device)
    return found  # type: ignore[return-value]


def _all_tensors(model: NativeModel) -> Iterator[torch.Tensor]:
    yield model.embedding
    if model.head is not model.embedding:
        yield model.head
    for layer in model.layers:
        for linear in (layer.attention.qkv, layer.attention.out):
            yield from linear.tensors()
        if isinstance(layer.mlp, Mlp):
            yield from layer.mlp.gate_up.tensors()
            yield from layer.mlp.down.tensors()
        else:
            yield from layer.mlp.tensors()
