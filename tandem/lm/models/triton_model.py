"""The Llama family on the Triton kernels: paged KV, fused norms, quantised linears, captured decode steps.

Tensors only on the device: a step is a StepInputs, so that the same code runs eagerly and inside a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import numpy as np
import torch

from kernels.packing import GGUF_BLOCK_BYTES, PackedWeight, concatenate, pack_gguf
from kernels.triton.attention import AttentionBatch, paged_attention
from kernels.triton.configs import current_target
from kernels.triton.configs import digest as tiles_digest
from kernels.triton.interpreter import interpreting
from kernels.triton.kv_write import rope_write_kv
from kernels.triton.linear import linear
from kernels.triton.norm import activation_and_mul, rms_norm
from kernels.triton.quant_linear import quant_linear
from tandem.lm.batch import KV, StepBatch
from tandem.lm.config import ModelConfig, RopeConfig, UnsupportedModel
from tandem.lm.decode_graphs import DecodeGraphs, StepInputs, capture_cuda
from tandem.lm.device_sampler import DeviceSampler
from tandem.lm.rope import RotaryTable
from tandem.lm.weights import WeightSource

_KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


class TritonKV:
    """K and V per layer, each [num_blocks, num_kv_heads, block_size, head_dim]; reserved, untouched until used.

    fp8 has one fp32 scale per token and head: [num_blocks, num_kv_heads, block_size].
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        shape = (num_blocks, config.num_kv_heads, block_size)

        def reserve(count: int, *dims: int, dtype: torch.dtype) -> list[torch.Tensor]:
            return [torch.empty(*shape, *dims, dtype=dtype, device=device) for _ in range(count)]

        self.keys = reserve(config.num_layers, config.head_dim, dtype=dtype)
        self.values = reserve(config.num_layers, config.head_dim, dtype=dtype)
        scaled = config.num_layers if dtype.itemsize == 1 else 0
        self.key_scales = reserve(scaled, dtype=torch.float32)
        self.value_scales = reserve(scaled, dtype=torch.float32)

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scales of a layer's keys and values, None for caches that need none."""
        return (self.key_scales[layer], self.value_scales[layer]) if self.key_scales else (None, None)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, source to destination, in every layer."""
        if pairs:
            source, target = torch.tensor(pairs, device=self.keys[0].device).unbind(1)
            for tensor in (*self.keys, *self.values, *self.key_scales, *self.value_scales):
                tensor[target] = tensor[source]


class Projection:
    """One matrix [out, in], or several with the same input: dense, or as the checkpoint quantised them."""

    def __init__(
        self, source: WeightSource, names: list[str], dtype: torch.dtype, device: torch.device, deterministic: bool
    ) -> None:
        self.deterministic = deterministic
        self.dense: torch.Tensor | None = None
        self.packed: list[PackedWeight] = []
        found = [packed_weight(source, name) for name in names]
        whole = [part for part in found if part is not None]
        if len(whole) == len(names):
            joined = concatenate(whole)
            self.packed = [part.to(device) for part in ([joined] if joined is not None else whole)]
        else:
            parts = [source.tensor(f"{name}.weight", dtype) for name in names]
            self.dense = torch.cat(parts).to(device)
        self.bias: torch.Tensor | None = None
        if any(source.has(f"{name}.bias") for name in names):
            sizes = [part.out_features for part in whole] if self.packed else [len(part) for part in parts]
            biases = [
                source.tensor(f"{name}.bias", dtype) if source.has(f"{name}.bias") else torch.zeros(size, dtype=dtype)
                for name, size in zip(names, sizes, strict=True)
            ]
            self.bias = torch.cat(biases).to(device)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if self.dense is not None:
            if self.deterministic:
                return linear(x, self.dense, self.bias, out_dtype)
            out = torch.nn.functional.linear(x, self.dense, self.bias)
            return out if out_dtype is None else out.to(out_dtype)
        outs = [quant_linear(x, part, deterministic=self.deterministic, out_dtype=out_dtype) for part in self.packed]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out if self.bias is None else out + self.bias

    @property
    def nbytes(self) -> int:
        dense = 0 if self.dense is None else self.dense.nbytes
        return dense + sum(part.nbytes for part in self.packed) + (0 if self.bias is None else self.bias.nbytes)


def packed_weight(source: WeightSource, name: str) -> PackedWeight | None:
    """The matrix as stored, where a kernel reads that form: GGUF Q4_0, Q4_1, Q8_0, and AWQ or GPTQ with four bits."""
    special: Callable[[str], PackedWeight | None] | None = getattr(source, "packed", None)
    if special is not None and (found := special(name)) is not None:
        return found
    raw = source.raw(f"{name}.weight")
    if raw is None or raw.ggml_type not in GGUF_BLOCK_BYTES:
        return None
    return pack_gguf(np.array(raw.data), raw.ggml_type, raw.shape[1])


class TritonLayer:
    """Weights of one decoder layer."""

    def __init__(
        self, source: WeightSource, layer: int, dtype: torch.dtype, device: torch.device, deterministic: bool
    ) -> None:
        stem = f"layers.{layer}"

        def projection(*kinds: str) -> Projection:
            return Projection(source, [f"{stem}.{kind}" for kind in kinds], dtype, device, deterministic)

        def norm(name: str) -> torch.Tensor | None:
            full = f"{stem}.{name}.weight"
            return norm_weight(source, full, device) if source.has(full) else None

        self.qkv, self.out = projection("q", "k", "v"), projection("o")
        self.gate_up, self.down = projection("gate", "up"), projection("down")
        self.attn_norm = norm_weight(source, f"{stem}.attn_norm.weight", device)
        self.mlp_norm = norm_weight(source, f"{stem}.mlp_norm.weight", device)
        config = source.config
        self.q_norm = norm("q_norm") if config.qk_norm else None
        self.k_norm = norm("k_norm") if config.qk_norm else None
        self.post_attn_norm = norm("post_attn_norm") if config.sandwich_norms else None
        self.post_mlp_norm = norm("post_mlp_norm") if config.sandwich_norms else None

    def projections(self) -> Iterator[Projection]:
        yield from (self.qkv, self.out, self.gate_up, self.down)


def norm_weight(source: WeightSource, name: str, device: torch.device) -> torch.Tensor:
    """A norm's fp32 weight, with Gemma's 1 added where the checkpoint leaves it out."""
    weight = source.tensor(name, torch.float32).to(device)
    return weight + 1.0 if source.config.norm_plus_one else weight


def _rotary_tables(source: WeightSource, positions: int, device: torch.device) -> list[torch.Tensor]:
    """cos | sin per layer, fp32 [positions, rotary_dim]; layers with one rope share a table."""
    config = source.config
    divisors = source.tensor("rope_freqs.weight", torch.float32) if source.has("rope_freqs.weight") else None
    # Without rotation the kernel turns two dims by 0.
    still = torch.tensor([1.0, 0.0], device=device).repeat(positions, 1)
    tables: dict[RopeConfig | None, torch.Tensor] = {None: still}
    for rope in (config.rope, config.rope_local):
        if rope is not None:
            halves = RotaryTable(rope, config.rotary_dim, device, divisors).table(positions)
            tables[rope] = torch.cat(halves, dim=-1).contiguous()
    return [tables[config.layer_rope(layer)] for layer in range(config.num_layers)]


class TritonModel:
    """Model over a WeightSource on the Triton kernels. Implements tandem.lm.batch.Model.

    deterministic: a row's bits depend on its sequence alone; without it dense linears are the vendor's BLAS and tiles
    follow the batch. Raises UnsupportedModel for experts, and on the CPU outside Triton's interpreter.
    """

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        positions: int,
        progress: Callable[[int, int], None] | None = None,
        *,
        deterministic: bool = True,
    ) -> None:
        config = source.config
        if config.num_experts:
            raise UnsupportedModel(f"{config.architecture}: the Triton path has no experts")
        if device.type == "cpu" and not interpreting():
            raise UnsupportedModel("Triton kernels need a GPU; on the CPU only TRITON_INTERPRET=1 runs them, slowly")
        self.config, self.dtype, self.device = config, dtype, device
        self.deterministic = self.batch_invariant = deterministic
        self.dtype_name = self.default_kv_dtype = str(dtype).removeprefix("torch.")
        target = current_target()
        self.kernel_path = "interpreter/triton"
        if device.type != "cpu":
            # Tiles rule the order of sums, so they belong to the numerics id.
            self.kernel_path = f"{device.type}/triton/{target}-{tiles_digest(target)}"
        self.embedding = source.tensor("embed.weight", dtype).to(device)
        self.layers: list[TritonLayer] = []
        for layer in range(config.num_layers):
            self.layers.append(TritonLayer(source, layer, dtype, device, deterministic))
            if progress is not None:
                progress(layer + 1, config.num_layers)
        self.norm = norm_weight(source, "norm.weight", device)
        tied = config.tied_embeddings or not source.has("head.weight")
        self.head = Projection(source, ["embed" if tied else "head"], dtype, device, deterministic)
        if tied and self.head.dense is not None:
            self.head.dense = self.embedding
        self._tables = _rotary_tables(source, positions, device)
        self.graphs: DecodeGraphs | None = None
        if device.type == "cuda":
            self.graphs = DecodeGraphs(self.step_logits, capture_cuda, positions)
        self.weight_bytes = self.embedding.nbytes + sum(
            projection.nbytes for layer in self.layers for projection in layer.projections()
        )
        if self.head.dense is not self.embedding:
            self.weight_bytes += self.head.nbytes

    def _kv_dtype(self, name: str) -> torch.dtype:
        found = _KV_DTYPES.get(name)
        if found is None:
            raise ValueError(f"kv_dtype is {name!r}, but the Triton kernels know {', '.join(_KV_DTYPES)}")
        if found.itemsize > 1 and found != self.dtype:
            raise ValueError(f"kv_dtype is {name!r}, but the Triton kernels keep {self.dtype_name} or fp8 here")
        if found.itemsize == 1 and torch.version.hip:
            return torch.float8_e4m3fnuz
        return found

    def kv_block_bytes(self, block_size: int, kv_dtype: str) -> int:
        config, width = self.config, self._kv_dtype(kv_dtype).itemsize
        row = config.head_dim * width + (4 if width == 1 else 0)
        return 2 * config.num_layers * config.num_kv_heads * block_size * row

    def new_kv(self, num_blocks: int, block_size: int, kv_dtype: str, max_rows: int) -> TritonKV:
        return TritonKV(self.config, num_blocks, block_size, self._kv_dtype(kv_dtype), self.device)

    def inputs(self, batch: StepBatch) -> StepInputs:
        """The step's arrays on the device; rows that only pad are dropped."""

        def move(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device, dtype)

        counts = np.diff(batch.query_start)
        attention = AttentionBatch(
            move(batch.query_start, torch.int32),
            move(batch.context_lens, torch.int32),
            move(batch.block_tables, torch.int32),
            int(counts.max(initial=0)),
            int(batch.context_lens.max(initial=0)),
        )
        return StepInputs(
            move(batch.token_ids[: batch.rows], torch.int64),
            move(batch.positions[: batch.rows], torch.int32),
            move(batch.slots, torch.int64),
            attention,
            move(batch.logit_rows, torch.int64),
        )

    def states(self, step: StepInputs, kv: TritonKV) -> torch.Tensor:
        """Writes KV; final-norm states [len(logit_rows), hidden_size]."""
        eps, scale = self.config.norm_eps, self.config.residual_scale
        residual = self.embedding[step.token_ids]
        if self.config.embedding_scale != 1.0:
            # Gemma rounds the factor to the activations' dtype.
            residual = residual * torch.tensor(self.config.embedding_scale, dtype=residual.dtype)
        branch: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            x = rms_norm(
                residual if branch is None else branch, layer.attn_norm, eps, None if branch is None else residual
            )
            branch = self._branch(self._attention(x, index, step, kv), layer.post_attn_norm, scale)
            x = rms_norm(branch, layer.mlp_norm, eps, residual)
            x = activation_and_mul(layer.gate_up(x), self.config.activation)
            branch = self._branch(layer.down(x), layer.post_mlp_norm, scale)
        rows = residual[step.logit_rows]
        return rms_norm(
            rows if branch is None else branch[step.logit_rows], self.norm, eps, None if branch is None else rows
        )

    def _branch(self, x: torch.Tensor, norm: torch.Tensor | None, scale: float) -> torch.Tensor:
        x = x if norm is None else rms_norm(x, norm, self.config.norm_eps)
        return x if scale == 1.0 else x * scale

    def _attention(self, x: torch.Tensor, index: int, step: StepInputs, kv: TritonKV) -> torch.Tensor:
        config, layer = self.config, self.layers[index]
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        mixed = layer.qkv(x).view(-1, heads + 2 * kv_heads, dim)
        query, key, value = mixed.split([heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(query.reshape(-1, dim), layer.q_norm, config.norm_eps).view(-1, heads, dim)
            key = rms_norm(key.reshape(-1, dim), layer.k_norm, config.norm_eps).view(-1, kv_heads, dim)
        keys, values, (k_scale, v_scale) = kv.keys[index], kv.values[index], kv.scales(index)
        rope_write_kv(
            query,
            key,
            value,
            self._tables[index],
            step.positions,
            step.slots,
            keys,
            values,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        out = paged_attention(
            query,
            keys,
            values,
            step.attention,
            scale=config.scale,
            window=config.window(index) or None,
            softcap=config.attention_softcap,
            deterministic=self.deterministic,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return layer.out(out.view(-1, heads * dim))

    def new_sampler(self, vocab_size: int) -> DeviceSampler:
        """A sampler that reads raw_logits where they are."""
        return DeviceSampler(vocab_size, self.device)

    def step_logits(self, step: StepInputs, kv: TritonKV) -> torch.Tensor:
        """Writes KV; raw fp32 logits [len(logit_rows), vocab_size] on the device."""
        out = self.head(self.states(step, kv), torch.float32)
        if self.config.logit_divisor != 1.0:
            out = out / self.config.logit_divisor
        cap = self.config.logit_softcap
        return cap * torch.tanh(out / cap) if cap else out

    @torch.inference_mode()
    def raw_logits(self, batch: StepBatch, kv: KV) -> torch.Tensor:
        """Like logits, left on the device for DeviceSampler. Decode steps run in a captured graph once there is one."""
        step, cache = self.inputs(batch), cast(TritonKV, kv)
        found = None if self.graphs is None else self.graphs.run(step, cache)
        return self.step_logits(step, cache) if found is None else found

    @torch.inference_mode()
    def idle(self) -> bool:
        """Captures one decode step that was wanted, if any. Returns whether more are waiting."""
        return self.graphs is not None and self.graphs.capture_next()

    @torch.inference_mode()
    def logits(self, batch: StepBatch, kv: KV) -> np.ndarray:
        return self.raw_logits(batch, kv).cpu().numpy()

    @torch.inference_mode()
    def hidden(self, batch: StepBatch, kv: KV) -> np.ndarray:
        return self.states(self.inputs(batch), cast(TritonKV, kv)).float().cpu().numpy()
