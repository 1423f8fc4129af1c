"""Models on the compiled CPU kernels: weights in tiles as the file has them, one native call per step."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from filelock import FileLock

from kernels import cpu
from kernels.cpu.decoder import Decoder, DecoderModel, KvCache, LayerWeights
from kernels.cpu.four_bit import pack_halves
from kernels.cpu.tile_cache import Entry, open_tiles, write_tiles
from kernels.cpu.tiles import LAYOUT_VERSION, Kind, Source, TileWeight, exact_kind, pack
from tandem.lm.batch import KV, StepBatch
from tandem.lm.config import ModelConfig, UnsupportedModel
from tandem.lm.models.compiled_sampler import CompiledSampler, token_scores
from tandem.lm.models.native import rotary_tables
from tandem.lm.types import TokenScore
from tandem.lm.weights import RawTensor, WeightSource
from tandem.paths import cache_dir

log = logging.getLogger(__name__)

_SOURCES = {source.name: source for source in Source}
_NAMES = ("q", "k", "v", "o", "gate", "up", "down")
_Tiles = dict[str, TileWeight]


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
    gives_hidden = True

    def __init__(
        self,
        source: WeightSource,
        dtype: str,
        exact: bool,
        positions: int,
        digest: str,
        progress: Callable[[int, int], None],
    ) -> None:
        """dtype: "auto" keeps each matrix as the file has it; "float32" and "bfloat16" convert. positions: the longest
        sequence. digest: of the weights, names the tile file.

        Raises:
            UnsupportedModel: the kernels do not know this model; the message says why.
        """
        config = source.config
        _check(config)
        self._kind = Kind.F32 if exact or dtype == "float32" else Kind.BF16 if dtype == "bfloat16" else None
        self.kernel_path = f"cpu/{cpu.isa()}"
        self.arithmetic = cpu.arithmetic()
        self.dtype_name = "float32" if self._kind is Kind.F32 else dtype
        self.default_kv_dtype = "float32" if exact else "bfloat16"
        self._positions = positions
        self._logits = np.empty((0, config.vocab_size), np.float32)
        # Of the last step: the id of each row's greatest logit.
        self._best = np.empty(0, np.int32)
        self._model = self._build(source, self._all_tiles(source, digest, progress))
        tiles = {id(tile): tile for tile in self._tiles()}
        self.weight_bytes = sum(tile.nbytes for tile in tiles.values())
        heads, inner = config.num_heads + 2 * config.num_kv_heads, config.intermediate_size
        widest = max(config.hidden_size, config.num_heads * config.head_dim, inner)
        # Numbers in fp32 that the decoder keeps per row; its inputs of linears have three forms of 4, 2 and 1 bytes.
        self.row_width = 2 * config.hidden_size + (heads + config.num_heads) * config.head_dim + 2 * inner + 2 * widest

    @property
    def decoder_model(self) -> DecoderModel:
        """The model as the kernels see it."""
        return self._model

    def _tiles(self) -> list[TileWeight]:
        layers = [getattr(layer, name) for layer in self._model.layers for name in _NAMES]
        return [self._model.embed, self._model.head, *layers]

    def _build(self, source: WeightSource, tiles: _Tiles) -> DecoderModel:
        config = source.config
        tables = {
            rope: tuple(part.numpy() for part in table.table(self._positions))
            for rope, table in rotary_tables(source, torch.device("cpu")).items()
        }
        half = (self._positions, config.rotary_dim // 2)
        # A layer without rope turns by nothing.
        unturned = (np.ones(half, np.float32), np.zeros(half, np.float32))
        layers = []
        for layer in range(config.num_layers):
            rope = config.layer_rope(layer)
            cos, sin = unturned if rope is None else tables[rope]
            layers.append(_layer(source, tiles, layer, cos, sin))
        return DecoderModel(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            eps=config.norm_eps,
            embed=tiles["embed"],
            head=tiles.get("head", tiles["embed"]),
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

    def _tile_kind(self, source: WeightSource, raw: RawTensor | None) -> Kind:
        """The form of a matrix: as stored if the kernels know it, else what dtype asks for, else bf16 or fp32."""
        if self._kind is not None:
            return self._kind
        if raw is not None and raw.ggml_type in _SOURCES:
            return exact_kind(_SOURCES[raw.ggml_type])
        return Kind.F32 if source.config.torch_dtype == "float32" else Kind.BF16

    def _pack(self, source: WeightSource, name: str, out: np.ndarray | None = None) -> TileWeight:
        raw = source.raw(f"{name}.weight")
        kind = self._tile_kind(source, raw)
        if raw is not None and raw.ggml_type in _SOURCES:
            return pack(
                _SOURCES[raw.ggml_type], np.ascontiguousarray(raw.data), raw.shape[0], raw.shape[1], kind, out=out
            )
        if self._kind is None and (tile := _four_bit(source, name)) is not None:
            return tile
        values = np.ascontiguousarray(source.tensor(f"{name}.weight", torch.float32).numpy())
        return pack(Source.F32, values, values.shape[0], values.shape[1], kind, out=out)

    def _all_tiles(self, source: WeightSource, digest: str, progress: Callable[[int, int], None]) -> _Tiles:
        """Tiles of all matrices; of a GGUF file they come from a file that the engines of a machine share."""
        names = _matrix_names(source)
        entries = []
        if self._kind is None:
            for name in names:
                # Only its form: all at once, what the source has to reorder would be in memory twice.
                raw = source.raw(f"{name}.weight")
                if raw is not None:
                    entries.append(Entry(name, *raw.shape, self._tile_kind(source, raw)))
        if len(entries) == len(names):
            try:
                return self._shared_tiles(source, digest, entries, progress)
            except OSError as error:
                log.warning("weights are packed for this process alone, no tile file can be kept: %s", error)
        found = {}
        for done, name in enumerate(names):
            found[name] = self._pack(source, name)
            progress(done + 1, len(names))
        return found

    def _shared_tiles(
        self, source: WeightSource, digest: str, entries: list[Entry], progress: Callable[[int, int], None]
    ) -> _Tiles:
        path = cache_dir() / "tiles" / f"{digest}-v{LAYOUT_VERSION}.tiles"
        if found := open_tiles(path, entries):
            return found
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            # Another engine may have written it meanwhile.
            if found := open_tiles(path, entries):
                return found
            with write_tiles(path, entries) as buffers:
                for done, (name, out) in enumerate(buffers.items()):
                    self._pack(source, name, out)
                    progress(done + 1, len(buffers))
        found = open_tiles(path, entries)
        if found is None:
            raise OSError(f"{path} cannot be read back")
        return found

    def kv_block_bytes(self, block_size: int, kv_dtype: str) -> int:
        model = self._model
        try:
            return KvCache.block_bytes(len(model.layers), model.kv_heads, model.head_dim, block_size, kv_dtype)
        except KeyError:
            raise ValueError(f"kv_dtype is {kv_dtype!r}, but the CPU kernels know float32, bfloat16 and int8") from None

    def new_kv(self, num_blocks: int, block_size: int, kv_dtype: str, max_rows: int) -> CompiledKV:
        return CompiledKV(self._model, num_blocks, block_size, kv_dtype, max_rows, self._positions)

    def new_sampler(self, vocab_size: int) -> CompiledSampler:
        return CompiledSampler(vocab_size, self.greatest)

    def greatest(self, logits: np.ndarray) -> np.ndarray | None:
        """Ids of the greatest logits as Decoder.forward gives them, int32 [rows], if `logits` is what it gave last."""
        last = self._logits[: len(self._best)]
        same = logits.shape == last.shape and logits.strides == last.strides
        return self._best if same and logits.ctypes.data == last.ctypes.data else None

    def token_scores(self, logits: np.ndarray, ids: list[int], alternatives: list[int]) -> list[TokenScore]:
        return token_scores(logits, ids, alternatives)

    def logits(self, batch: StepBatch, kv: KV) -> np.ndarray:
        """Valid until the next call: megabytes that were mapped afresh in each step would cost more than sampling."""
        out = self._logits_of(len(batch.logit_rows))
        self._forward(batch, cast(CompiledKV, kv), logits=out if len(out) else None)
        return out

    def _logits_of(self, rows: int) -> np.ndarray:
        """Room for the logits of a step."""
        if rows > len(self._logits):
            self._logits = np.empty((max(rows, 2 * len(self._logits)), self._model.vocab), np.float32)
        return self._logits[:rows]

    def logits_and_hidden(self, batch: StepBatch, kv: KV) -> tuple[np.ndarray, np.ndarray]:
        """The logits are valid until the next call."""
        rows = len(batch.logit_rows)
        out, hidden = self._logits_of(rows), np.empty((rows, self._model.hidden), np.float32)
        self._forward(batch, cast(CompiledKV, kv), out if rows else None, hidden if rows else None)
        return out, hidden

    @property
    def embedding_tiles(self) -> TileWeight:
        """The input embedding as the kernels read it."""
        return self._model.embed

    def embedding_rows(self, ids: list[int]) -> np.ndarray:
        weight, unpack = self._model.embed.struct(), cpu.library().td_unpack_row
        out = np.empty((len(ids), self._model.hidden), np.float32)
        for row, token in enumerate(ids):
            unpack(weight, token, out[row].ctypes.data)
        return out

    def hidden(self, batch: StepBatch, kv: KV) -> np.ndarray:
        out = np.empty((len(batch.logit_rows), self._model.hidden), np.float32)
        self._forward(batch, cast(CompiledKV, kv), hidden=out if len(out) else None)
        return out

    def _forward(
        self, batch: StepBatch, kv: CompiledKV, logits: np.ndarray | None = None, hidden: np.ndarray | None = None
    ) -> None:
        starts = batch.query_start
        # A step without logits leaves those of an earlier one as they are.
        if logits is not None:
            self._best = np.empty(len(logits), np.int32)
        kv.decoder.forward(
            tokens=batch.token_ids[: batch.rows].astype(np.int32),
            row_start=starts,
            start=batch.context_lens - (starts[1:] - starts[:-1]),
            block_tables=batch.block_tables,
            out_rows=batch.logit_rows.astype(np.int32),
            logits=logits,
            hidden=hidden,
            best=None if logits is None else self._best,
        )


def _four_bit(source: WeightSource, name: str) -> TileWeight | None:
    """An AWQ or GPTQ matrix in tiles of four bits, exactly. None if it is none, or its inputs are permuted."""
    packed = getattr(source, "packed", None)
    weight = packed(name) if packed is not None else None
    if weight is None or weight.bits != 4 or weight.zeros is None or weight.permutation is not None:
        return None
    groups = weight.in_features // weight.group_size
    scales, zeros = weight.scales[:groups].float().numpy(), weight.zeros[:groups].float().numpy()
    return pack_halves(weight.codes.numpy(), scales, zeros, weight.in_features)


def _matrix_names(source: WeightSource) -> list[str]:
    """Names of all matrices, without .weight."""
    tied = source.config.tied_embeddings or not source.has("head.weight")
    layers = [f"layers.{layer}.{name}" for layer in range(source.config.num_layers) for name in _NAMES]
    return ["embed", *layers] if tied else ["embed", "head", *layers]


def _layer(source: WeightSource, tiles: _Tiles, layer: int, cos: np.ndarray, sin: np.ndarray) -> LayerWeights:
    config, stem = source.config, f"layers.{layer}"
    optional: dict[str, np.ndarray] = {}
    if config.qk_norm:
        optional |= {name: _norm(source, f"{stem}.{name}") for name in ("q_norm", "k_norm")}
    if config.sandwich_norms:
        optional |= {name: _norm(source, f"{stem}.{name}") for name in ("post_attn_norm", "post_mlp_norm")}
    for name in _NAMES:
        if source.has(f"{stem}.{name}.bias"):
            optional[f"{name}_bias"] = source.tensor(f"{stem}.{name}.bias", torch.float32).numpy()
    matrices = {name: tiles[f"{stem}.{name}"] for name in _NAMES}
    return LayerWeights(
        attn_norm=_norm(source, f"{stem}.attn_norm"),
        mlp_norm=_norm(source, f"{stem}.mlp_norm"),
        cos=cos,
        sin=sin,
        window=config.window(layer),
        **matrices,  # type: ignore[arg-type]
        **optional,  # type: ignore[arg-type]
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
