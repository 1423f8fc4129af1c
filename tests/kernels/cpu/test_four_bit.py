"""Grouped four-bit weights as tiles: the same values, whatever the group."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import cpu
from kernels.cpu.four_bit import pack_groups

pytestmark = pytest.mark.skipif(not cpu.available(), reason="CPU kernels are not built")


@pytest.mark.parametrize(("n", "k", "group"), [(16, 32, 32), (40, 256, 128), (7, 96, 96), (33, 192, 64)])
def test_tiles_hold_the_values_exactly(n: int, k: int, group: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (k, n)).astype(np.uint8)
    scales = rng.uniform(-0.1, 0.1, (k // group, n)).astype(np.float16)
    zeros = rng.integers(0, 16, (k // group, n))
    wide = np.repeat(scales.astype(np.float64), group, axis=0), np.repeat(zeros, group, axis=0)
    expected = (codes - wide[1]) * wide[0]
    found = pack_groups(codes, scales, zeros).dequantize().T
    # code * scale is rounded once when a row is read back; what is stored is not.
    assert np.abs(found - expected).max() <= 2e-7
    assert found.shape == (k, n)


def test_groups_that_tiles_cannot_hold_are_refused() -> None:
    codes = np.zeros((96, 16), np.uint8)
    with pytest.raises(ValueError, match="multiple of 32"):
        pack_groups(codes, np.zeros((6, 16)), np.zeros((6, 16)))
    with pytest.raises(ValueError, match="expected"):
        pack_groups(codes, np.zeros((3, 16)), np.zeros((3, 15)))
