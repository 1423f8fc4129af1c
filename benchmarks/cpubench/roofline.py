"""This machine's own limits, measured just before: memory bandwidth, int8 and fp32 rates of the kernels in cache."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import numpy as np

from kernels import cpu
from kernels.cpu import abi
from kernels.cpu.tiles import Kind, TileWeight, aligned, pack_float, tile_bytes


@dataclass(frozen=True)
class Limits:
    """GB/s of reading weights from memory; GOP/s (multiply and add count as two) of linears in cache."""

    memory_gb_s: float
    int4_gop_s: float
    int8_gop_s: float
    fp32_gop_s: float
    isa: str
    threads: int


def _seconds(weight: TileWeight, rows: int, repeats: int) -> float:
    """Best time of one linear through the pool."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, weight.k)).astype(np.float32)
    f, q = np.empty_like(x), np.empty(x.shape, np.int8)
    b, h = np.empty((rows, weight.k // 32, 4), np.float32), np.empty(x.shape, np.uint16)
    act = abi.Act(f.ctypes.data, q.ctypes.data, b.ctypes.data, h.ctypes.data, weight.k)
    out, view, best = np.empty((rows, weight.n), np.float32), weight.struct(), float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        cpu.library().td_linear(
            ctypes.byref(view), ctypes.byref(act), x.ctypes.data, rows, out.ctypes.data, weight.n, None
        )
        best = min(best, time.perf_counter() - start)
    return best


def _q4(n: int, k: int) -> TileWeight:
    data = aligned(tile_bytes(Kind.Q4_1, n, k))
    data[:] = 0x11
    return TileWeight(data, n, k, Kind.Q4_1)


def measure(threads: int) -> Limits:
    """Takes a few seconds and 300 MB."""
    cpu.set_threads(threads)
    large = _q4(64 * 1024, 6144)
    memory = large.nbytes / _seconds(large, 1, 12) / 1e9
    del large
    rows, n, k = 64, 1536, 576
    work = 2.0 * rows * n * k / 1e9
    values = np.random.default_rng(1).standard_normal((n, k)).astype(np.float32)
    return Limits(
        memory_gb_s=memory,
        int4_gop_s=work / _seconds(_q4(n, k), rows, 60),
        int8_gop_s=work / _seconds(pack_float(values, Kind.Q8_C), rows, 60),
        fp32_gop_s=work / _seconds(pack_float(values), rows, 60),
        isa=cpu.isa(),
        threads=threads,
    )
