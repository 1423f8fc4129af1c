"""Linears on tiles against fp64, and the same bits for every number of rows."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.tiles import Kind
from tests.kernels.cpu.helpers import random_weight, run_linear

QUANTISED = [kind for kind in Kind if kind not in (Kind.F32, Kind.BF16)]
SHAPES = [(16, 32), (48, 96), (33, 160), (7, 64)]


def bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantised_equals_fp64_on_the_activations_used(isa: str, kind: Kind, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    n, k = shape
    weight = random_weight(rng, kind, n, k)
    bias = rng.standard_normal(n).astype(np.float32)
    for rows in (1, 3, 4, 9, 17):
        x = rng.standard_normal((rows, k)).astype(np.float32)
        out, act = run_linear(weight, x, bias)
        # int8 per block of 32: half a step of error at most.
        step = np.repeat(np.abs(x).reshape(rows, -1, 32).max(-1), 32, axis=1) / 127
        assert (np.abs(act.meant() - x) <= step * 0.501 + 1e-7).all()
        wide = weight.dequantize().astype(np.float64)
        expected = act.meant() @ wide.T + bias
        scale = np.abs(act.meant()) @ np.abs(wide).T + 1.0
        assert np.abs(out - expected).max() < 1e-5 * scale.max()


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float_equals_fp64(isa: str, kind: Kind, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(2)
    n, k = shape
    weight = random_weight(rng, kind, n, k)
    for rows in (1, 2, 6, 7, 19):
        x = rng.standard_normal((rows, k)).astype(np.float32)
        out, _ = run_linear(weight, x)
        if kind is Kind.BF16 and isa == "avx512bf16":
            x = bf16(x)
        expected = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
        assert np.abs(out - expected).max() < 2e-5


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_in_every_batch(isa: str, kind: Kind) -> None:
    rng = np.random.default_rng(3)
    weight = random_weight(rng, kind, 50, 224)
    x = rng.standard_normal((40, 224)).astype(np.float32)
    whole, _ = run_linear(weight, x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 23, 40):
        for start in (0, 40 - rows):
            part, _ = run_linear(weight, np.ascontiguousarray(x[start : start + rows]))
            assert np.array_equal(part, whole[start : start + rows]), (rows, start)


def test_extreme_integers_do_not_saturate(isa: str) -> None:
    """Pairs of ±127 times the largest weights pass 16 bits in the naive AVX2 form."""
    rng = np.random.default_rng(4)
    for kind in QUANTISED:
        weight = random_weight(rng, kind, 16, 64)
        payload = weight.data.reshape(1, 2, -1)
        payload[:, :, : 256 if payload.shape[2] < 512 else 512] = 255 if kind != Kind.Q2_K else 0x33
        if kind in (Kind.Q5_0,):
            payload[:, :, :512] = 112
        elif kind in (Kind.Q5_1, Kind.Q5_K):
            payload[:, :, :512] = 159
        elif kind is Kind.Q6_K:
            payload[:, :, :512] = 96
        for sign in (1.0, -1.0):
            x = np.full((5, 64), sign, np.float32)
            out, act = run_linear(weight, x)
            expected = act.meant() @ weight.dequantize().astype(np.float64).T
            assert np.allclose(out, expected, rtol=1e-5, atol=1e-5), kind


def test_zero_and_tiny_activations(isa: str) -> None:
    weight = random_weight(np.random.default_rng(5), Kind.Q4_1, 16, 64)
    x = np.zeros((2, 64), np.float32)
    x[1] = 1e-42
    out, act = run_linear(weight, x)
    assert np.array_equal(out, np.zeros_like(out))
    assert np.isfinite(act.b[..., :2]).all()
