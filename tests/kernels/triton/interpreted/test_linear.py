"""Dense, W8A8 and group-quantised linears against fp64 references, and packing against independent encoders."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.packing import PackedWeight, PackingError, pack_awq, pack_gguf, pack_gptq
from kernels.reference import linear as reference
from kernels.triton.configs import Tile
from kernels.triton.linear import linear, linear_w8a8, quantize_rows, split_k
from kernels.triton.quant_linear import quant_linear

TILE = Tile(block_m=16, block_n=32, block_k=64)
# Error of one rounding of the output, relative to it, plus that of fp32 sums.
CLOSE = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def close(out: torch.Tensor, wanted: torch.Tensor) -> None:
    assert not torch.isnan(out).any()
    slack = CLOSE[out.dtype]
    torch.testing.assert_close(out.double(), wanted, rtol=slack, atol=slack * float(wanted.abs().mean()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(70, 1200), (33, 64), (1, 7)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype: torch.dtype, n: int, k: int, bias: bool) -> None:
    x, weight = torch.randn(5, k).to(dtype), torch.randn(n, k).to(dtype)
    offset = torch.randn(n).to(dtype) if bias else None
    close(linear(x, weight, offset, config=TILE), reference.linear(x, weight, offset))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_batch_invariant(dtype: torch.dtype) -> None:
    x, weight = torch.randn(37, 1100).to(dtype), torch.randn(40, 1100).to(dtype)
    assert split_k(40, 1100, TILE)[0] == 2
    whole = linear(x, weight, config=TILE)
    for rows in (slice(0, 1), slice(20, 23), slice(36, 37)):
        assert torch.equal(linear(x[rows], weight, config=TILE), whole[rows])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_w8a8(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 1100), torch.randn(40, 1100)
    codes, scales = quantize_rows(x, dtype)
    wanted_codes, wanted_scales = reference.quantize_rows(x, dtype)
    assert torch.equal(codes.float(), wanted_codes.float()) and torch.equal(scales, wanted_scales)
    w_codes, w_scales = quantize_rows(weight, dtype)
    bias = torch.randn(40)
    out = linear_w8a8(codes, scales, w_codes, w_scales, bias, out_dtype=torch.float32, config=TILE)
    close(out, reference.linear_w8a8(codes, scales, w_codes, w_scales, bias))


def test_rounding_of_int8_is_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]])
    assert quantize_rows(x, torch.int8)[0].tolist() == [[127, 0, 2, 2, 0, -2, -126]]


def check_packed(weight: PackedWeight, plain: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Dequantisation equals the format's own, and the kernel multiplies by it."""
    assert torch.equal(reference.dequantise(weight), plain)
    for rows in (1, 19):
        x = torch.randn(rows, plain.shape[1]).to(dtype)
        close(quant_linear(x, weight, config=TILE), reference.quant_linear(x, weight))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("in_features", [32, 576, 1088])
def test_gguf(kind: str, in_features: int) -> None:
    value = getattr(gguf.GGMLQuantizationType, kind)
    blocks = gguf.quants.quantize(torch.randn(24, in_features).numpy(), value)
    plain = torch.from_numpy(gguf.quants.dequantize(blocks, value).astype(np.float32))
    check_packed(pack_gguf(blocks, kind, in_features), plain)


def encode(nibbles: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Codes [R, C] → int32 [R, C / 8], nibble j of a word holding column order[j] of its eight."""
    eights = nibbles.long().view(nibbles.shape[0], -1, 8)
    words = sum(eights[..., column] << (4 * place) for place, column in enumerate(order))
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("group", [32, 64, 160])
def test_awq(group: int) -> None:
    codes, zeros = torch.randint(0, 16, (320, 48)), torch.randint(0, 16, (320 // group, 48))
    scales = torch.rand(320 // group, 48).half()
    rows = torch.arange(320) // group
    plain = ((codes - zeros[rows]).float() * scales[rows].float()).T
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    check_packed(pack_awq(encode(codes, order), encode(zeros, order), scales, group), plain, torch.float16)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("group", [32, 320])
def test_gptq(group: int, ordered: bool) -> None:
    codes, zeros = torch.randint(0, 16, (320, 48)), torch.randint(1, 17, (320 // group, 48))
    scales = torch.rand(320 // group, 48).half()
    g_idx = torch.arange(320).div(group, rounding_mode="floor")
    if not ordered:
        g_idx = g_idx[torch.randperm(320)]
    plain = ((codes - zeros[g_idx]).float() * scales[g_idx].float()).T
    straight = list(range(8))
    qweight = encode(codes.T.contiguous(), straight).T.contiguous()
    packed = pack_gptq(qweight, encode(zeros - 1, straight), scales, group, g_idx.int())
    assert (packed.permutation is None) == (ordered or group == 320)
    check_packed(packed, plain, torch.float16)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 40), st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]))
def test_drawn_shapes(m: int, n: int, blocks: int, kind: str) -> None:
    value = getattr(gguf.GGMLQuantizationType, kind)
    packed = pack_gguf(gguf.quants.quantize(torch.randn(n, 32 * blocks).numpy(), value), kind, 32 * blocks)
    x, bias = torch.randn(m, 32 * blocks), torch.randn(n)
    close(quant_linear(x, packed, bias, config=TILE), reference.quant_linear(x, packed, bias))


def test_quant_linear_is_batch_invariant() -> None:
    blocks = gguf.quants.quantize(torch.randn(40, 1088).numpy(), gguf.GGMLQuantizationType.Q4_1)
    packed = pack_gguf(blocks, "Q4_1", 1088)
    x = torch.randn(37, 1088).bfloat16()
    whole = quant_linear(x, packed, config=TILE)
    for rows in (slice(0, 1), slice(20, 23), slice(36, 37)):
        assert torch.equal(quant_linear(x[rows], packed, config=TILE), whole[rows])


def test_poison_behind_the_inputs_is_not_read() -> None:
    """K = 96 is padded to 128 in the weight; x is a view whose neighbours are NaN."""
    packed = pack_gguf(gguf.quants.quantize(torch.randn(8, 96).numpy(), gguf.GGMLQuantizationType.Q4_0), "Q4_0", 96)
    wide = torch.full((3, 128), float("nan"))
    wide[:, :96] = torch.randn(3, 96)
    close(quant_linear(wide[:, :96], packed, config=TILE), reference.quant_linear(wide[:, :96], packed))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(PackingError, match="Q5_0"):
        pack_gguf(torch.zeros(1, 22, dtype=torch.uint8), "Q5_0", 32)
    with pytest.raises(PackingError, match="Q4_0 with K = 64"):
        pack_gguf(torch.zeros(1, 18, dtype=torch.uint8), "Q4_0", 64)
    words = torch.zeros(320, 6, dtype=torch.int32)
    with pytest.raises(PackingError, match="group size 48"):
        pack_awq(words, words[:6], torch.zeros(6, 48).half(), 48)
    with pytest.raises(PackingError, match="g_idx"):
        pack_gptq(words[:40], words[:10, :1], torch.zeros(10, 6).half(), 32, torch.zeros(320, dtype=torch.int32))
    with pytest.raises(ValueError, match="does not fit"):
        linear(torch.zeros(2, 3), torch.zeros(4, 5))
    with pytest.raises(ValueError, match="wanted int8"):
        linear_w8a8(torch.zeros(2, 3), torch.zeros(2), torch.zeros(4, 3), torch.zeros(4))
