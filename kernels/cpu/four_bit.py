"""Four-bit weights with groups of any multiple of 32 (AWQ, GPTQ) as tiles, exactly: the tiles' blocks of 32 repeat the
group's scale."""

from __future__ import annotations

import numpy as np

from kernels.cpu.tiles import TILE_INPUTS, TILE_OUTPUTS, Kind, TileWeight, aligned, tile_bytes


def pack_groups(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> TileWeight:
    """Tiles of w = (code - zero) * scale, held as code * scale + minimum with both in fp32.

    codes: uint8 [k, n], 0 to 15; scales, zeros: [k / group, n]. An fp16 scale times a four-bit zero fits fp32, so
    nothing is rounded. Raises ValueError if k, the groups or the shapes do not fit.
    """
    k, n = codes.shape
    groups = len(scales)
    if scales.shape != (groups, n) or zeros.shape != (groups, n):
        raise ValueError(f"scales {scales.shape} and zeros {zeros.shape} of {n} outputs: expected [groups, {n}]")
    if groups == 0 or k % groups or (k // groups) % TILE_INPUTS:
        raise ValueError(f"{k} inputs in {groups} groups: a group must be a multiple of {TILE_INPUTS} inputs")
    columns, blocks = -(-n // TILE_OUTPUTS), k // TILE_INPUTS
    padding = ((0, 0), (0, columns * TILE_OUTPUTS - n))
    # [block, c, half, j, column, lane]: input 8 c + 4 half + j of a block; a byte holds both halves.
    cut = np.pad(codes, padding).reshape(blocks, 4, 2, 4, columns, TILE_OUTPUTS)
    body = (cut[:, :, 0] | (cut[:, :, 1] << 4)).transpose(3, 0, 1, 4, 2).reshape(columns, blocks, -1)
    scale = scales.astype(np.float32)
    numbers = [np.pad(part, padding) for part in (scale, -zeros.astype(np.float32) * scale)]
    repeated = [
        np.repeat(part, blocks // groups, axis=0).reshape(blocks, columns, TILE_OUTPUTS).transpose(1, 0, 2)
        for part in numbers
    ]
    tail = np.ascontiguousarray(np.concatenate(repeated, axis=-1)).view(np.uint8)
    out = aligned(tile_bytes(Kind.Q4_K, n, k))
    out[:] = np.concatenate([body, tail], axis=-1).reshape(-1)
    return TileWeight(out, n, k, Kind.Q4_K)


def pack_halves(halves: np.ndarray, scales: np.ndarray, zeros: np.ndarray, k: int) -> TileWeight:
    """The same from kernels.packing.PackedWeight's codes: uint8 [ceil(k / 64) * 32, n], inputs j and j + 32 of 64 in a
    byte; scales and zeros of padding groups are dropped."""
    n = halves.shape[1]
    pairs = halves.reshape(-1, 1, 32, n)
    codes = np.concatenate([pairs & 15, pairs >> 4], axis=1).reshape(-1, n)[:k]
    return pack_groups(np.ascontiguousarray(codes), scales, zeros)
