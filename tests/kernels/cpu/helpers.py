"""Small models and direct calls for tests of the CPU kernels."""

from __future__ import annotations

import ctypes

import numpy as np

from kernels.cpu import abi, library
from kernels.cpu.decoder import Decoder, DecoderModel, KvCache, LayerWeights
from kernels.cpu.tiles import Kind, TileWeight, aligned, pack_float, tile_bytes

F32_PAYLOAD = {Kind.Q4_1: 256, Kind.Q4_0: 256, Kind.Q4_K: 256, Kind.Q2_K: 256, Kind.Q3_K: 256}
# Groups of scales per tile, half precision or not, minima or not.
FORMS: dict[Kind, tuple[int, bool, bool]] = {
    Kind.Q4_1: (1, True, True),
    Kind.Q4_0: (1, True, False),
    Kind.Q8_0: (1, True, False),
    Kind.Q5_0: (1, True, False),
    Kind.Q5_1: (1, True, True),
    Kind.Q4_K: (1, False, True),
    Kind.Q5_K: (1, False, True),
    Kind.Q6_K: (2, False, False),
    Kind.Q2_K: (2, False, True),
    Kind.Q3_K: (2, False, False),
    Kind.Q8_C: (1, False, False),
}
# Range of the stored unsigned value per kind.
STORED = {
    Kind.Q8_0: (1, 256),
    Kind.Q8_C: (1, 256),
    Kind.Q5_0: (112, 144),
    Kind.Q5_1: (128, 160),
    Kind.Q5_K: (128, 160),
    Kind.Q6_K: (96, 160),
}


def random_weight(rng: np.random.Generator, kind: Kind, n: int, k: int, size: float = 0.05) -> TileWeight:
    """A weight of random tiles: every value that the kind can hold may occur."""
    if kind in (Kind.F32, Kind.BF16):
        return pack_float(rng.standard_normal((n, k)).astype(np.float32) * size, kind)
    groups, half, minima = FORMS[kind]
    payload = F32_PAYLOAD.get(kind, 512)
    columns, blocks = -(-n // 16), k // 32
    if payload == 256:
        high = 4 if kind == Kind.Q2_K else 16
        low = rng.integers(0, high, (columns, blocks, 256))
        body = (low | (rng.integers(0, high, low.shape) << 4)).astype(np.uint8)
    else:
        body = rng.integers(*STORED[kind], (columns, blocks, 512)).astype(np.uint8)
    spread = {256: 8.0, 512: 128.0}[payload] if kind not in STORED or STORED[kind][1] == 256 else 16.0
    scale = rng.uniform(0.2, 1.0, (columns, blocks, groups * 16)) * size / spread
    parts = [scale * rng.choice([-1.0, 1.0], scale.shape)]
    if minima:
        parts.append(rng.standard_normal(scale.shape) * size)
    numbers = np.concatenate(parts, axis=-1).astype(np.float16 if half else np.float32)
    raw = np.concatenate([body, numbers.view(np.uint8)], axis=-1)
    data = aligned(tile_bytes(kind, n, k))
    data[:] = raw.reshape(-1)
    return TileWeight(data, n, k, kind)


class Activations:
    """Room for the forms that the kernels bring activations into."""

    def __init__(self, rows: int, k: int) -> None:
        self.f = np.full((rows, k), np.nan, np.float32)
        self.q = np.full((rows, k), 99, np.int8)
        self.b = np.full((rows, k // 32, 4), np.nan, np.float32)
        self.h = np.zeros((rows, k), np.uint16)
        self.view = abi.Act(self.f.ctypes.data, self.q.ctypes.data, self.b.ctypes.data, self.h.ctypes.data, k)

    def meant(self) -> np.ndarray:
        """The values that int8 activations stand for, fp64."""
        return self.q.astype(np.float64) * np.repeat(self.b[..., 0].astype(np.float64), 32, axis=1)


def run_linear(weight: TileWeight, x: np.ndarray, bias: np.ndarray | None = None) -> tuple[np.ndarray, Activations]:
    """x [rows, k] through the kernel: outputs fp32 [rows, n] out of a poisoned buffer, and the activations used."""
    act = Activations(len(x), weight.k)
    out = np.full((len(x), weight.n + 3), np.nan, np.float32)
    view = weight.struct()
    library().td_linear(
        ctypes.byref(view), ctypes.byref(act.view), x.ctypes.data, len(x), out.ctypes.data, out.shape[1],
        None if bias is None else bias.ctypes.data,
    )  # fmt: skip
    assert np.isnan(out[:, weight.n :]).all(), "wrote beyond the row"
    return out[:, : weight.n].copy(), act


def tiny_model(
    rng: np.random.Generator,
    kind: Kind = Kind.F32,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 96,
    vocab: int = 101,
    positions: int = 2048,
    rotary_dim: int | None = None,
    window: int = 0,
    biases: bool = False,
    qk_norm: bool = False,
    sandwich: bool = False,
    **options: float | str,
) -> DecoderModel:
    """A random decoder-only model."""
    rotary = head_dim if rotary_dim is None else rotary_dim
    angles = np.arange(positions)[:, None] / 10_000.0 ** (np.arange(0, rotary, 2) / rotary)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    q, kv = heads * head_dim, kv_heads * head_dim

    def vector(size: int) -> np.ndarray:
        return (1.0 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    def bias(size: int) -> np.ndarray | None:
        return (0.1 * rng.standard_normal(size)).astype(np.float32) if biases else None

    def weight(n: int, k: int) -> TileWeight:
        return random_weight(rng, kind, n, k, 1.0 / k**0.5)

    stack = [
        LayerWeights(
            attn_norm=vector(hidden),
            mlp_norm=vector(hidden),
            q=weight(q, hidden),
            k=weight(kv, hidden),
            v=weight(kv, hidden),
            o=weight(hidden, q),
            gate=weight(intermediate, hidden),
            up=weight(intermediate, hidden),
            down=weight(hidden, intermediate),
            post_attn_norm=vector(hidden) if sandwich else None,
            post_mlp_norm=vector(hidden) if sandwich else None,
            q_norm=vector(head_dim) if qk_norm else None,
            k_norm=vector(head_dim) if qk_norm else None,
            q_bias=bias(q),
            k_bias=bias(kv),
            v_bias=bias(kv),
            o_bias=bias(hidden),
            gate_bias=bias(intermediate),
            up_bias=bias(intermediate),
            down_bias=bias(hidden),
            cos=cos,
            sin=sin,
            window=window if index % 2 == 0 else 0,
        )
        for index in range(layers)
    ]
    embed = random_weight(rng, kind, vocab, hidden, 1.0)
    return DecoderModel(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary,
        intermediate=intermediate,
        vocab=vocab,
        eps=1e-5,
        embed=embed,
        head=embed,
        final_norm=vector(hidden),
        layers=stack,
        **options,  # type: ignore[arg-type]
    )


def new_cache(model: DecoderModel, blocks: int, kv_dtype: str, block_size: int = 16) -> KvCache:
    """A cache whose unwritten slots are poison: NaN where the type has one."""
    cache = KvCache(model, blocks, block_size, kv_dtype)
    poison = {"float32": np.nan, "bfloat16": 0x7FC0, "int8": 77}[cache.kv_dtype]
    for array in (*cache.keys, *cache.values):
        array[:] = poison
    for array in (*cache.key_scales, *cache.value_scales):
        array[:] = np.nan
    return cache


def run_step(
    decoder: Decoder, slices: list[tuple[list[int], int, list[int]]], out_rows: list[int] | None = None
) -> np.ndarray:
    """One step of (tokens, first position, block table) slices; logits fp32 [rows wanted, vocab], all finite."""
    tokens = [token for item in slices for token in item[0]]
    wanted = np.asarray(range(len(tokens)) if out_rows is None else out_rows, np.int32)
    tables = np.zeros((len(slices), max(len(item[2]) for item in slices)), np.int32)
    for row, item in enumerate(slices):
        tables[row, : len(item[2])] = item[2]
    logits = np.full((len(wanted), decoder.model.vocab), np.nan, np.float32)
    best = np.full(len(wanted), -3, np.int32)
    decoder.forward(
        np.asarray(tokens, np.int32),
        np.cumsum([0, *(len(item[0]) for item in slices)], dtype=np.int32),
        np.asarray([item[1] for item in slices], np.int32),
        tables,
        wanted,
        logits,
        best=best,
    )
    assert best.tolist() == logits.argmax(axis=1).tolist()
    return logits


def reference_logits(model: DecoderModel, tokens: list[int]) -> np.ndarray:
    """fp64 logits [len(tokens), vocab] of one sequence, from the tiles' exact values."""

    def wide(weight: TileWeight) -> np.ndarray:
        return weight.dequantize().astype(np.float64)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + model.eps) * weight

    def plus(x: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        return x if bias is None else x + bias

    def cap(x: np.ndarray, limit: float) -> np.ndarray:
        return limit * np.tanh(x / limit) if limit else x

    rows = len(tokens)
    half, heads, kv_heads, dim = model.rotary_dim // 2, model.heads, model.kv_heads, model.head_dim
    x = wide(model.embed)[tokens] * model.embed_scale
    where = np.arange(rows)
    for layer in model.layers:

        def rotate(y: np.ndarray, layer: LayerWeights = layer) -> np.ndarray:
            c, s = layer.cos[:rows, None].astype(np.float64), layer.sin[:rows, None].astype(np.float64)
            a, b = y[..., :half], y[..., half : 2 * half]
            return np.concatenate([a * c - b * s, b * c + a * s, y[..., 2 * half :]], axis=-1)

        h = norm(x, layer.attn_norm)
        q = plus(h @ wide(layer.q).T, layer.q_bias).reshape(rows, heads, dim)
        k = plus(h @ wide(layer.k).T, layer.k_bias).reshape(rows, kv_heads, dim)
        v = plus(h @ wide(layer.v).T, layer.v_bias).reshape(rows, kv_heads, dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        q, k = rotate(q), np.repeat(rotate(k), heads // kv_heads, axis=1)
        v = np.repeat(v, heads // kv_heads, axis=1)
        scale = dim**-0.5 if model.attn_scale is None else model.attn_scale
        scores = cap(np.einsum("qhd,khd->hqk", q, k) * scale, model.attn_softcap)
        hidden = where[None, :] > where[:, None]
        if layer.window:
            hidden |= where[None, :] <= where[:, None] - layer.window
        scores[:, hidden] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        branch = plus(np.einsum("hqk,khd->qhd", weights, v).reshape(rows, -1) @ wide(layer.o).T, layer.o_bias)
        if layer.post_attn_norm is not None:
            branch = norm(branch, layer.post_attn_norm)
        x = x + model.residual_scale * branch
        h = norm(x, layer.mlp_norm)
        gate = plus(h @ wide(layer.gate).T, layer.gate_bias)
        if model.activation == "silu":
            gate = gate / (1.0 + np.exp(-gate))
        else:
            gate = 0.5 * gate * (1.0 + np.tanh(0.7978845608028654 * (gate + 0.044715 * gate**3)))
        branch = plus((gate * plus(h @ wide(layer.up).T, layer.up_bias)) @ wide(layer.down).T, layer.down_bias)
        if layer.post_mlp_norm is not None:
            branch = norm(branch, layer.post_mlp_norm)
        x = x + model.residual_scale * branch
    logits = norm(x, model.final_norm) @ wide(model.head).T * model.logit_scale
    return cap(logits, model.logit_softcap)
