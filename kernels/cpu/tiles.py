"""Weights in tiles: packing from GGUF blocks, plain arrays and int8 rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kernels.cpu import abi, library

TILE_OUTPUTS = 16
TILE_INPUTS = 32
# Bumped whenever a tile's layout changes: part of a tile cache's key.
LAYOUT_VERSION = 1


class Kind(IntEnum):
    """Tile forms (TdKind): each holds the file format of its name exactly."""

    F32 = 0
    BF16 = 1
    Q4_1 = 2
    Q4_0 = 3
    Q8_0 = 4
    Q5_0 = 5
    Q5_1 = 6
    Q4_K = 7
    Q5_K = 8
    Q6_K = 9
    Q2_K = 10
    Q3_K = 11
    Q8_C = 12


class Source(IntEnum):
    """What weights are packed from: GGUF tensor type numbers, and int8 rows with a scale."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30
    # One fp32 scale, then k int8 values, per row.
    I8_ROW = 100


# Weights per block and bytes per block of each source.
SOURCE_BLOCKS: dict[Source, tuple[int, int]] = {
    Source.F32: (1, 4),
    Source.F16: (1, 2),
    Source.BF16: (1, 2),
    Source.Q4_0: (32, 18),
    Source.Q4_1: (32, 20),
    Source.Q5_0: (32, 22),
    Source.Q5_1: (32, 24),
    Source.Q8_0: (32, 34),
    Source.Q2_K: (256, 84),
    Source.Q3_K: (256, 110),
    Source.Q4_K: (256, 144),
    Source.Q5_K: (256, 176),
    Source.Q6_K: (256, 210),
}


@dataclass(frozen=True, eq=False)
class TileWeight:
    """One linear layer's weight in tiles. `data` is uint8, C-contiguous, and must outlive its users."""

    data: np.ndarray
    n: int
    k: int
    kind: Kind

    def struct(self) -> abi.Weight:
        """The C view; valid while `data` lives."""
        return abi.Weight(self.data.ctypes.data, self.n, self.k, int(self.kind), 0)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dequantize(self) -> np.ndarray:
        """The weight's exact values, fp32 [n, k]."""
        out = np.empty((self.n, self.k), dtype=np.float32)
        view, lib = self.struct(), library()
        for row in range(self.n):
            lib.td_unpack_row(view, row, out[row].ctypes.data)
        return out


def exact_kind(source: Source) -> Kind:
    """The tile kind that holds a source's values exactly."""
    return Kind(library().td_exact_kind(int(source)))


def tile_bytes(kind: Kind, n: int, k: int) -> int:
    """Bytes of an [n, k] weight in tiles."""
    columns = -(-n // TILE_OUTPUTS)
    return columns * int(library().td_column_bytes(int(kind), -(-k // TILE_INPUTS) * TILE_INPUTS))


def pack(
    source: Source,
    blocks: np.ndarray,
    n: int,
    k: int,
    kind: Kind | None = None,
    rows: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> TileWeight:
    """Packs an [n, k] weight into tiles.

    blocks: the file's bytes, row after row (any dtype, C-contiguous). kind: None = the exact one; F32 and BF16 take any
    source; Q8_C quantises a plain source to int8 with one fp32 scale per 32 weights. rows: int32 [n], the source row of
    each output row (to undo a permutation). out: uint8 buffer of tile_bytes(kind, n, k), or None to allocate.
    Raises ValueError on sizes that do not fit or on a conversion that would not be exact.
    """
    source = Source(source)
    kind = exact_kind(source) if kind is None else Kind(kind)
    row_bytes = 4 + k if source == Source.I8_ROW else k * SOURCE_BLOCKS[source][1] // SOURCE_BLOCKS[source][0]
    if source != Source.I8_ROW and k % SOURCE_BLOCKS[source][0]:
        raise ValueError(f"{source.name} rows hold a multiple of {SOURCE_BLOCKS[source][0]} weights, got {k}")
    if not blocks.flags.c_contiguous:
        raise ValueError("blocks must be C-contiguous")
    high = n if rows is None else int(rows.max()) + 1
    if rows is not None and (rows.dtype != np.int32 or rows.shape != (n,) or rows.min() < 0):
        raise ValueError(f"rows must be int32 [{n}] of row numbers, got {rows.dtype} {rows.shape}")
    if blocks.nbytes < high * row_bytes:
        raise ValueError(f"{source.name} [{high}, {k}] takes {high * row_bytes} bytes, got {blocks.nbytes}")
    size = tile_bytes(kind, n, k)
    if out is None:
        out = aligned(size)
    if out.nbytes != size or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"out must be uint8 [{size}], got {out.dtype} of {out.nbytes} bytes")
    padded = -(-k // TILE_INPUTS) * TILE_INPUTS
    order = None if rows is None else np.ascontiguousarray(rows)
    code = library().td_pack(
        int(source), int(kind), blocks.ctypes.data, row_bytes, n, padded, k,
        None if order is None else order.ctypes.data, out.ctypes.data,
    )  # fmt: skip
    if code:
        raise ValueError(f"{source.name} [{n}, {k}] can't be held exactly by tiles of kind {kind.name}")
    return TileWeight(out, n, padded, kind)


def pack_float(weight: np.ndarray, kind: Kind = Kind.F32) -> TileWeight:
    """Packs an fp32 [n, k] array as F32, BF16 (rounded to nearest even) or Q8_C tiles."""
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    return pack(Source.F32, weight, weight.shape[0], weight.shape[1], kind)


def aligned(size: int) -> np.ndarray:
    """An uninitialised uint8 array whose first byte is 64-byte aligned."""
    raw = np.empty(size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]
