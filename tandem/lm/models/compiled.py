"""Models on the compiled CPU kernels: weights in tiles as the file has them, one native call per step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from kernels import cpu
from kernels.cpu.decoder import Decoder, DecoderModel, KvCache, LayerWeights
from kernels.cpu.tiles import Kind, Source, TileWeight, pack, pack_float
from tandem.lm.batch import KV, StepBatch
from tandem.lm.config import ModelConfig, UnsupportedModel
from tandem.lm.models.native import rotary_tables
from tandem.lm.weights import WeightSource

_SOURCES = {int(source) for source in Source}
# One hidden or logit row per row of a step at most.
_NAMES = ("q", "k", "v", "o", "gate", "up", "down")


class CompiledKV:
    """KV in the kernels' layout and the decoder bound to it."""

    def __init__(
        self, model: DecoderModel, num_blocks: int, block_size: int, kv_dtype: str, max_rows: int, positions: int
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._cache = KvCache(model, num_blocks, block_size, kv_dtype)
        self.decoder = Decoder(model, self._cache, max_rows, max_rows, positions)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        self._cache.copy_blocks(pairs)


class CompiledModel:
    """Model over a WeightSource. Implements tandem.lm.batch.Model."""

    batch_invariant = True

    def __init__(
        self,
        source: WeightSource,
        dtype: str,
        exact: bool,
        positions: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """dtype: "auto" keeps each matrix as the file has it; "float32" and "bfloat16" convert. positions: the longest
        sequence.

        Raises:
            UnsupportedModel: the kernels do not know this model; the message says why.
        """
        config = source.config
        _check(config)
        self._kind = Kind.F32 if exact or dtype == "float32" else Kind.BF16 if dtype == "bfloat16" else None
        self.kernel_path = f"cpu/{cpu.isa()}"
        self.dtype_name = "float32" if self._kind is Kind.F32 else dtype
        self.default_kv_dtype = "float32" if exact else "bfloat16"
        self._positions = positions
        self._model = self._build(source, progress)
        tiles = {id(tile): tile for tile in self._tiles()}
        self.weight_bytes = sum(tile.nbytes for tile in tiles.values())

    def _tiles(self) -> list[TileWeight]:
        layers = [getattr(layer, name) for layer in self._model.layers for name in _NAMES]
        return [self._model.embed, self._model.head, *layers]

    def _build(self, source: WeightSource, progress: Callable[[int, int], None] | None) -> DecoderModel:
        config = source.config
        tables = {
            rope: tuple(part.numpy() for part in table.table(self._positions))
            for rope, table in rotary_tables(source, torch.device("cpu")).items()
        }
        half = (self._positions, config.rotary_dim // 2)
        # A layer without rope turns by nothing.
        unturned = (np.ones(half, np.float32), np.zeros(half, np.float32))
        embed = self._tile(source, "embed")
        layers = []
        for layer in range(config.num_layers):
            rope = config.layer_rope(layer)
            cos, sin = unturned if rope is None else tables[rope]
            layers.append(self._layer(source, layer, cos, sin))
            if progress is not None:
                progress(layer + 1, config.num_layers)
        tied = config.tied_embeddings or not source.has("head.weight")
        return DecoderModel(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            eps=config.norm_eps,
            embed=embed,
            head=embed if tied else self._tile(source, "head"),
            final_norm=_norm(source, "norm"),
            layers=layers,
            activation=config.activation,
            attn_scale=config.scale,
            attn_softcap=config.attention_softcap,
            logit_softcap=config.logit_softcap,
            embed_scale=config.embedding_scale,
            logit_scale=1.0 / config.logit_divisor,
            residual_scale=config.residual_scale,
        )

    def _layer(self, source: WeightSource, layer: int, cos: np.ndarray, sin: np.ndarray) -> LayerWeights:
        config, stem = source.config, f"layers.{layer}"
        optional: dict[str, np.ndarray] = {}
        if config.qk_norm:
            optional |= {name: _norm(source, f"{stem}.{name}") for name in ("q_norm", "k_norm")}
        if config.sandwich_norms:
            optional |= {name: _norm(source, f"{stem}.{name}") for name in ("post_attn_norm", "post_mlp_norm")}
        for name in _NAMES:
            if source.has(f"{stem}.{name}.bias"):
                optional[f"{name}_bias"] = source.tensor(f"{stem}.{name}.bias", torch.float32).numpy()
        fields: dict[str, Any] = {name: self._tile(source, f"{stem}.{name}") for name in _NAMES}
        return LayerWeights(
            attn_norm=_norm(source, f"{stem}.attn_norm"),
            mlp_norm=_norm(source, f"{stem}.mlp_norm"),
            cos=cos,
            sin=sin,
            window=config.window(layer),
            **fields,
            **optional,
        )

    def _tile(self, source: WeightSource, name: str) -> TileWeight:
        """The matrix `name`.weight in tiles: as stored if the kernels know the form, else in bf16 or fp32."""
        raw = source.raw(f"{name}.weight")
        if raw is not None and raw.ggml_type in _SOURCES:
            rows, cols = raw.shape
            return pack(Source(raw.ggml_type), np.ascontiguousarray(raw.data), rows, cols, self._kind)
        values = source.tensor(f"{name}.weight", torch.float32).numpy()
        kind = self._kind
        if kind is None:
            kind = Kind.F32 if source.config.torch_dtype == "float32" else Kind.BF16
        return pack_float(values, kind)

    def kv_block_bytes(self, block_size: int, kv_dtype: str) -> int:
        model = self._model
        try:
            return KvCache.block_bytes(len(model.layers), model.kv_heads, model.head_dim, block_size, kv_dtype)
        except KeyError:
            raise ValueError(f"kv_dtype is {kv_dtype!r}, but the CPU kernels know float32, bfloat16 and int8") from None

    def new_kv(self, num_blocks: int, block_size: int, kv_dtype: str, max_rows: int) -> CompiledKV:
        return CompiledKV(self._model, num_blocks, block_size, kv_dtype, max_rows, self._positions)

    def logits(self, batch: StepBatch, kv: KV) -> np.ndarray:
        out = np.empty((len(batch.logit_rows), self._model.vocab), np.float32)
        self._forward(batch, cast(CompiledKV, kv), logits=out if len(out) else None)
        return out

    def hidden(self, batch: StepBatch, kv: KV) -> np.ndarray:
        out = np.empty((len(batch.logit_rows), self._model.hidden), np.float32)
        self._forward(batch, cast(CompiledKV, kv), hidden=out if len(out) else None)
        return out

    def _forward(
        self, batch: StepBatch, kv: CompiledKV, logits: np.ndarray | None = None, hidden: np.ndarray | None = None
    ) -> None:
        starts = batch.query_start
        kv.decoder.forward(
            tokens=batch.token_ids[: batch.rows].astype(np.int32),
            row_start=starts,
            start=(batch.context_lens - np.diff(starts)).astype(np.int32),
            block_tables=batch.block_tables,
            out_rows=batch.logit_rows.astype(np.int32),
            logits=logits,
            hidden=hidden,
        )


def _norm(source: WeightSource, name: str) -> np.ndarray:
    weight = source.tensor(f"{name}.weight", torch.float32).numpy()
    return weight + np.float32(1.0) if source.config.norm_plus_one else weight


def _check(config: ModelConfig) -> None:
    """Raises UnsupportedModel for what the kernels cannot do."""
    if not cpu.available():
        raise UnsupportedModel(f"the CPU kernels are not available: {cpu.reason()}")
    if config.num_experts:
        raise UnsupportedModel("the CPU kernels have no mixture of experts")
    for name, value, multiple in (
        ("hidden_size", config.hidden_size, 32),
        ("heads · head_dim", config.num_heads * config.head_dim, 32),
        ("intermediate_size", config.intermediate_size, 32),
        ("head_dim", config.head_dim, 16),
    ):
        if value % multiple:
            raise UnsupportedModel(f"the CPU kernels need {name} to be a multiple of {multiple}, and it is {value}")


def set_threads(count: int) -> None:
    """Sizes the kernels' pool, unless it has that size."""
    library: ctypes.CDLL = cpu.library()
    if int(library.td_threads()) != count:
        cpu.set_threads(count)
