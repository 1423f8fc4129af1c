"""One linear layer over tiles, by itself: the decoder has its own; this is for small networks beside it."""

from __future__ import annotations

import ctypes

import numpy as np

from kernels.cpu import abi, library
from kernels.cpu.tiles import TileWeight


class Linear:
    """y = x · Wᵀ through the process's pool. Keeps buffers for its inputs' forms; one thread calls it."""

    def __init__(self, weight: TileWeight) -> None:
        self.n, self.k = weight.n, weight.k
        self._weight = weight
        self._struct = weight.struct()
        self._reference = ctypes.byref(self._struct)
        self._call = library().td_linear
        self._rows = 0
        self._reserve(1)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def _reserve(self, rows: int) -> None:
        self._rows = rows
        k = self.k
        # fp32, int8 with 16 bytes per block of 32, and bf16: what TdAct names.
        self._buffers: list[np.ndarray] = [
            np.empty((rows, k), np.float32),
            np.empty((rows, k), np.int8),
            np.empty((rows, k // 32, 16), np.uint8),
            np.empty((rows, k), np.uint16),
        ]
        self._act = abi.Act(*(buffer.ctypes.data for buffer in self._buffers), k)
        self._act_reference = ctypes.byref(self._act)

    def __call__(self, x: np.ndarray, out: np.ndarray) -> None:
        """x fp32 [rows, k], out fp32 [rows, n], both C-contiguous.

        Raises ValueError on other shapes.
        """
        rows = x.shape[0]
        for name, array, width in (("x", x, self.k), ("out", out, self.n)):
            if array.shape != (rows, width) or array.dtype != np.float32 or not array.flags.c_contiguous:
                raise ValueError(f"{name} must be contiguous fp32 [{rows}, {width}], got {array.dtype} {array.shape}")
        if rows > self._rows:
            self._reserve(max(rows, 2 * self._rows))
        self._call(
            self._reference, self._act_reference, x.ctypes.data, rows, out.ctypes.data, self.n, None
        )  # fmt: skip
