"""The native decoder: a model description bound to tiles and KV caches, and one call per step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kernels.cpu import abi, library
from kernels.cpu.tiles import TileWeight

KV_TYPES = {"float32": 0, "bfloat16": 1, "int8": 2}
KV_WIDTH = {"float32": 4, "bfloat16": 2, "int8": 1}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
# Parts of a step that Decoder.profiled times, in the order of TdPart.
PARTS = ("embed", "norm", "qkv", "rope", "attention", "out", "gate_up", "gated", "down", "head")
_ERRORS = {
    -1: "too many rows",
    -2: "too many output rows",
    -3: "inconsistent step (positions, tokens or block ids out of range)",
}


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. Norms and biases are fp32 [size]; None where the model has none."""

    attn_norm: np.ndarray
    mlp_norm: np.ndarray
    q: TileWeight
    k: TileWeight
    v: TileWeight
    o: TileWeight
    gate: TileWeight
    up: TileWeight
    down: TileWeight
    post_attn_norm: np.ndarray | None = None
    post_mlp_norm: np.ndarray | None = None
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None
    q_bias: np.ndarray | None = None
    k_bias: np.ndarray | None = None
    v_bias: np.ndarray | None = None
    o_bias: np.ndarray | None = None
    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    # fp32 [max_positions, rotary_dim / 2]; layers may share them.
    cos: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    sin: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    # Sliding window in positions, the row itself included; 0: none.
    window: int = 0


@dataclass(frozen=True, eq=False)
class DecoderModel:
    """A decoder-only transformer for the native kernels. hidden, heads * head_dim and intermediate are multiples of 32,
    head_dim is a multiple of 16 and at most 512."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    intermediate: int
    vocab: int
    eps: float
    embed: TileWeight
    head: TileWeight
    final_norm: np.ndarray
    layers: list[LayerWeights]
    head_bias: np.ndarray | None = None
    activation: str = "silu"
    attn_scale: float | None = None
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    residual_scale: float = 1.0


@dataclass(frozen=True, eq=False)
class KvView:
    """Where the paged KV of each layer lies: addresses, kept alive by `owner`."""

    num_blocks: int
    block_size: int
    kv_dtype: str
    keys: list[int]
    values: list[int]
    key_scales: list[int]
    value_scales: list[int]
    owner: object


class KvCache:
    """Paged KV of all layers, untouched pages cost no memory.

    Per layer, K as [num_blocks, kv_heads, block_size / 16, head_dim, 16] and V as [num_blocks, kv_heads, block_size,
    head_dim] in fp32 or int8; int8 adds fp32 scales [num_blocks, kv_heads, block_size] for each. bf16 (as uint16) has
    pairs side by side: K as [num_blocks, kv_heads, block_size / 16, head_dim / 2, 16, 2], V as [num_blocks, kv_heads,
    block_size / 2, head_dim, 2].
    """

    def __init__(self, model: DecoderModel, num_blocks: int, block_size: int, kv_dtype: str) -> None:
        if kv_dtype not in KV_TYPES:
            raise ValueError(f"kv_dtype {kv_dtype!r}: the CPU kernels know {', '.join(KV_TYPES)}")
        if block_size < 16 or block_size % 16:
            raise ValueError(f"block_size {block_size}: the CPU kernels need a multiple of 16")
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks, self.block_size, self.kv_dtype = num_blocks, block_size, kv_dtype
        width = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[kv_dtype]
        unit = model.kv_heads * block_size
        layers = len(model.layers)
        # np.zeros maps fresh pages lazily.
        self.keys = [np.zeros((num_blocks, unit * model.head_dim), width) for _ in range(layers)]
        self.values = [np.zeros((num_blocks, unit * model.head_dim), width) for _ in range(layers)]
        scaled = layers if kv_dtype == "int8" else 0
        self.key_scales = [np.zeros((num_blocks, unit), np.float32) for _ in range(scaled)]
        self.value_scales = [np.zeros((num_blocks, unit), np.float32) for _ in range(scaled)]

    def view(self) -> KvView:
        """The addresses that a Decoder binds."""
        groups = (self.keys, self.values, self.key_scales, self.value_scales)
        keys, values, key_scales, value_scales = ([int(array.ctypes.data) for array in group] for group in groups)
        return KvView(self.num_blocks, self.block_size, self.kv_dtype, keys, values, key_scales, value_scales, self)

    @staticmethod
    def block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, kv_dtype: str) -> int:
        """Bytes of KV in one block over all layers."""
        per_token = 2 * kv_heads * (head_dim * KV_WIDTH[kv_dtype] + (4 if kv_dtype == "int8" else 0))
        return layers * per_token * block_size

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, source to destination, in order."""
        for arrays in (self.keys, self.values, self.key_scales, self.value_scales):
            for array in arrays:
                for source, target in pairs:
                    array[target] = array[source]


class Decoder:
    """Runs steps of a model. Holds what it points to. One thread calls it; a call releases the GIL."""

    def __init__(
        self, model: DecoderModel, cache: KvCache | KvView, max_rows: int, max_out: int, max_positions: int
    ) -> None:
        """max_rows: rows per step; max_out: rows per step that may want logits; max_positions: longest sequence.

        Raises ValueError for a shape that the kernels can't do, MemoryError without memory for the buffers.
        """
        _check(model, max_positions)
        if max_rows < 1 or max_out < 1:
            raise ValueError(f"max_rows and max_out must be at least 1, got {max_rows} and {max_out}")
        self.model, self.cache = model, cache.view() if isinstance(cache, KvCache) else cache
        self.max_rows, self.max_out, self.max_positions = max_rows, max_out, max_positions
        self._library = library()
        self._keep: list[np.ndarray] = []
        self._layers = (abi.Layer * len(model.layers))()
        for index, layer in enumerate(model.layers):
            self._bind_layer(self._layers[index], layer, index)
        view = self._model_struct()
        self._handle = self._library.td_decoder_new(ctypes.byref(view))
        if not self._handle:
            raise MemoryError(f"no memory for the buffers of {max_rows} rows")
        self._step = abi.Step()

    def _pointer(self, array: np.ndarray | None) -> int | None:
        if array is None:
            return None
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            array = np.ascontiguousarray(array, dtype=np.float32)
        self._keep.append(array)
        return int(array.ctypes.data)

    def _bind_layer(self, view: abi.Layer, layer: LayerWeights, index: int) -> None:
        cache = self.cache
        for name in abi.LAYER_POINTERS:
            if name not in abi.CACHE_POINTERS:
                setattr(view, name, self._pointer(getattr(layer, name)))
        view.k_cache, view.v_cache = cache.keys[index], cache.values[index]
        if cache.key_scales:
            view.k_scale, view.v_scale = cache.key_scales[index], cache.value_scales[index]
        for name in abi.LAYER_WEIGHTS:
            setattr(view, name, getattr(layer, name).struct())
        view.window = layer.window

    def _model_struct(self) -> abi.Model:
        model, view = self.model, abi.Model()
        view.n_layers, view.vocab = len(model.layers), model.vocab
        for name in ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "intermediate"):
            setattr(view, name, getattr(model, name))
        view.kv_type, view.block_size = KV_TYPES[self.cache.kv_dtype], self.cache.block_size
        view.activation = ACTIVATIONS[model.activation]
        view.max_rows, view.max_out, view.max_positions = self.max_rows, self.max_out, self.max_positions
        view.num_blocks = self.cache.num_blocks
        for name in ("eps", "attn_softcap", "logit_softcap", "embed_scale", "logit_scale", "residual_scale"):
            setattr(view, name, getattr(model, name))
        view.attn_scale = model.head_dim**-0.5 if model.attn_scale is None else model.attn_scale
        view.embed, view.head = model.embed.struct(), model.head.struct()
        view.final_norm, view.head_bias = self._pointer(model.final_norm), self._pointer(model.head_bias)
        view.layers = self._layers
        return view

    def forward(
        self,
        tokens: np.ndarray,
        row_start: np.ndarray,
        start: np.ndarray,
        block_tables: np.ndarray,
        out_rows: np.ndarray,
        logits: np.ndarray | None,
        hidden: np.ndarray | None = None,
        best: np.ndarray | None = None,
    ) -> None:
        """Computes KV for all rows and logits for `out_rows`.

        tokens int32 [M]; row_start int32 [S + 1], rows of each sequence; start int32 [S], position of each sequence's
        first row; block_tables int32 [S, B]; out_rows int32 [R], ascending; logits fp32 [R, vocab] or None;
        hidden fp32 [R, hidden], states after the final norm, or None; best int32 [R], the id of each row's greatest
        logit, the lowest of equal ones, -1 where all are -inf, -2 where one is NaN or +inf, or None; it needs logits.
        All C-contiguous.
        Raises ValueError when the step does not fit the decoder or contradicts itself.
        """
        for name, array in (("tokens", tokens), ("row_start", row_start), ("start", start), ("out_rows", out_rows)):
            if array.dtype != np.int32 or array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(f"{name} must be a contiguous int32 vector, got {array.dtype} {array.shape}")
        if block_tables.dtype != np.int32 or block_tables.ndim != 2 or not block_tables.flags.c_contiguous:
            raise ValueError(
                f"block_tables must be contiguous int32 [S, B], got {block_tables.dtype} {block_tables.shape}"
            )
        if len(row_start) != len(start) + 1 or len(block_tables) != len(start):
            raise ValueError(f"{len(start)} sequences, but {len(row_start)} row starts and {len(block_tables)} tables")
        self._check_out("logits", logits, len(out_rows), self.model.vocab)
        self._check_out("hidden", hidden, len(out_rows), self.model.hidden)
        if best is not None and (best.dtype != np.int32 or best.shape != (len(out_rows),) or logits is None):
            raise ValueError(f"best must be int32 [{len(out_rows)}] beside logits, got {best.dtype} {best.shape}")
        step = self._step
        step.n_rows, step.n_seqs, step.n_out = len(tokens), len(start), len(out_rows)
        step.tokens, step.row_start, step.start = tokens.ctypes.data, row_start.ctypes.data, start.ctypes.data
        step.block_tables, step.table_stride = block_tables.ctypes.data, block_tables.shape[1]
        step.out_rows = out_rows.ctypes.data
        step.logits = None if logits is None else logits.ctypes.data
        step.hidden = None if hidden is None else hidden.ctypes.data
        step.best = None if best is None else best.ctypes.data
        code = self._library.td_decoder_forward(self._handle, ctypes.byref(step))
        if code:
            raise ValueError(
                f"{_ERRORS.get(code, code)}: {len(tokens)} rows (at most {self.max_rows}), {len(out_rows)} output rows "
                f"(at most {self.max_out}), positions below {self.max_positions}"
            )

    def logits(self, hidden: np.ndarray, out: np.ndarray) -> None:
        """Logits fp32 [R, vocab] into `out`, of hidden states fp32 [R, hidden] after the final norm.

        Raises ValueError on shapes that do not fit.
        """
        self._check_out("hidden", hidden, len(hidden), self.model.hidden)
        self._check_out("out", out, len(hidden), self.model.vocab)
        if self._library.td_decoder_logits(self._handle, hidden.ctypes.data, len(hidden), out.ctypes.data):
            raise ValueError(f"{len(hidden)} rows of hidden states: must be 1 to {self.max_rows}")

    @contextmanager
    def profiled(self) -> Iterator[np.ndarray]:
        """Yields int64 [len(PARTS)]: nanoseconds that steps within the block spend in each part."""
        times = np.zeros(len(PARTS), np.int64)
        self._library.td_decoder_profile(self._handle, times.ctypes.data)
        try:
            yield times
        finally:
            self._library.td_decoder_profile(self._handle, None)

    @staticmethod
    def _check_out(name: str, array: np.ndarray | None, rows: int, width: int) -> None:
        if array is None:
            return
        if array.dtype != np.float32 or array.shape != (rows, width) or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be contiguous fp32 [{rows}, {width}], got {array.dtype} {array.shape}")

    def close(self) -> None:
        """Frees the buffers. Weights and KV stay with their owners."""
        if getattr(self, "_handle", None):
            self._library.td_decoder_free(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


def _check(model: DecoderModel, max_positions: int) -> None:
    for name, value in (
        ("hidden size", model.hidden),
        ("heads * head_dim", model.heads * model.head_dim),
        ("intermediate size", model.intermediate),
    ):
        if value % 32:
            raise ValueError(f"the CPU kernels need {name} to be a multiple of 32, got {value}")
    if model.head_dim % 16 or model.head_dim > 512:
        raise ValueError(f"the CPU kernels need head_dim to be a multiple of 16 up to 512, got {model.head_dim}")
    if model.heads % model.kv_heads:
        raise ValueError(f"{model.heads} heads do not divide over {model.kv_heads} KV heads")
    if model.activation not in ACTIVATIONS:
        raise ValueError(f"activation {model.activation!r}: the CPU kernels know {', '.join(ACTIVATIONS)}")
    half = (max_positions, model.rotary_dim // 2)
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    for index, layer in enumerate(model.layers):
        for name, table in (("cos", layer.cos), ("sin", layer.sin)):
            if table.shape[0] < half[0] or table.shape[1:] != half[1:]:
                raise ValueError(f"layer {index}: {name} must be [at least {half[0]}, {half[1]}], got {table.shape}")
        shapes = {
            "q": (queries, model.hidden),
            "k": (keys, model.hidden),
            "v": (keys, model.hidden),
            "o": (model.hidden, queries),
            "gate": (model.intermediate, model.hidden),
            "up": (model.intermediate, model.hidden),
            "down": (model.hidden, model.intermediate),
        }
        for name, shape in shapes.items():
            weight: TileWeight = getattr(layer, name)
            if (weight.n, weight.k) != shape:
                raise ValueError(f"layer {index}: {name} must be {list(shape)}, got [{weight.n}, {weight.k}]")
    for name, weight in (("embed", model.embed), ("head", model.head)):
        if (weight.n, weight.k) != (model.vocab, model.hidden):
            raise ValueError(f"{name} must be [{model.vocab}, {model.hidden}], got [{weight.n}, {weight.k}]")
