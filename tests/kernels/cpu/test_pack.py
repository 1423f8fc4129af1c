"""Packing: tiles hold exactly what the file's blocks mean."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from kernels import cpu
from kernels.cpu.tiles import SOURCE_BLOCKS, Kind, Source, exact_kind, pack, pack_float

pytestmark = pytest.mark.skipif(not cpu.available(), reason="CPU kernels are not built")
BLOCKS = [source for source, (weights, _) in SOURCE_BLOCKS.items() if weights > 1]
# Byte offsets of the fp16 numbers in each block, which random bytes must not turn into NaN.
HALVES = {
    Source.Q4_0: (0,), Source.Q4_1: (0, 2), Source.Q5_0: (0,), Source.Q5_1: (0, 2), Source.Q8_0: (0,),
    Source.Q2_K: (80, 82), Source.Q3_K: (108,), Source.Q4_K: (0, 2), Source.Q5_K: (0, 2), Source.Q6_K: (208,),
}  # fmt: skip


def random_blocks(source: Source, n: int, k: int) -> np.ndarray:
    rng = np.random.default_rng(int(source))
    weights, size = SOURCE_BLOCKS[source]
    raw = rng.integers(0, 256, (n, k // weights, size)).astype(np.uint8)
    for at in HALVES[source]:
        number = (rng.standard_normal((n, k // weights, 1)) * 0.01).astype(np.float16)
        raw[:, :, at : at + 2] = number.view(np.uint8)
    return raw.reshape(n, -1)


@pytest.mark.parametrize("source", BLOCKS, ids=lambda source: source.name)
def test_blocks_unpack_to_what_the_gguf_library_says(source: Source) -> None:
    raw = random_blocks(source, 21, 512)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(source)))
    packed = pack(source, raw, 21, 512)
    assert packed.kind == exact_kind(source)
    assert np.array_equal(packed.dequantize(), expected)
    assert np.array_equal(pack(source, raw, 21, 512, Kind.F32).dequantize(), expected)


def test_rows_are_taken_in_the_order_asked_for() -> None:
    raw = random_blocks(Source.Q4_1, 32, 64)
    order = np.random.default_rng(0).permutation(32).astype(np.int32)
    straight = pack(Source.Q4_1, raw, 32, 64).dequantize()
    assert np.array_equal(pack(Source.Q4_1, raw, 32, 64, rows=order).dequantize(), straight[order])


def test_plain_sources() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((18, 40)).astype(np.float32)
    assert np.array_equal(pack_float(values).dequantize()[:, :40], values)
    half = values.astype(np.float16)
    assert np.array_equal(pack(Source.F16, half, 18, 40).dequantize()[:, :40], half.astype(np.float32))
    rounded = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    bits = (rounded.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(pack(Source.BF16, bits, 18, 40).dequantize()[:, :40], rounded)
    coarse = pack_float(values, Kind.Q8_C).dequantize()[:, :40]
    assert np.abs(coarse - values).max() <= np.abs(values).max() / 127 * 0.51


def test_int8_rows() -> None:
    rng = np.random.default_rng(2)
    body, scales = rng.integers(-128, 128, (16, 64)).astype(np.int8), rng.random((16, 1)).astype(np.float32)
    raw = np.concatenate([scales.view(np.uint8), body.view(np.uint8)], axis=1)
    assert np.array_equal(pack(Source.I8_ROW, raw, 16, 64).dequantize(), body * scales)


def test_what_can_not_be_exact_is_refused() -> None:
    raw = random_blocks(Source.Q4_1, 16, 64)
    with pytest.raises(ValueError, match="can't be held exactly"):
        pack(Source.Q4_1, raw, 16, 64, Kind.Q8_0)
    with pytest.raises(ValueError, match="multiple of 32"):
        pack(Source.Q4_1, raw, 16, 60)
    with pytest.raises(ValueError, match="takes"):
        pack(Source.Q4_1, raw, 17, 64)
