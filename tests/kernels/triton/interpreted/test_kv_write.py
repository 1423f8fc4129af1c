"""RoPE and KV write against the torch reference; slots that are not written keep their poison."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import attention as reference
from kernels.triton.kv_write import rope_write_kv
from tests.kernels.triton.interpreted.cases import FP8

SLOTS = torch.tensor([3, 0, -1, 17, 63, 40, 16])
POSITIONS = torch.tensor([3, 0, 99, 7, 8, 50, 1], dtype=torch.int32)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan")).to(dtype)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal in bits, where NaN equals NaN."""
    return torch.equal(first.float().nan_to_num(12345.0), second.float().nan_to_num(12345.0))


SHAPES = [(64, 64, False), (80, 32, True), (96, 96, True), (128, 64, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "interleaved"), SHAPES)
@pytest.mark.parametrize("kv_dtype", [None, *FP8])
def test_against_reference(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    q, k, v = (torch.randn(7, heads, head_dim).to(dtype) for heads in (6, 2, 2))
    table = reference.rotary_table(100, rotary_dim)
    ours = [poisoned(4, 2, 16, head_dim, dtype=kv_dtype or dtype) for _ in range(2)]
    theirs = [cache.clone() for cache in ours]
    scales, scales_reference = ([poisoned(4, 2, 16, dtype=torch.float32) for _ in range(2)] for _ in range(2))
    turned_q, turned_k = (reference.rotate(x, POSITIONS, table, interleaved=interleaved) for x in (q, k))
    if kv_dtype is None:
        reference.write_kv(turned_k, v, *theirs, SLOTS)
        rope_write_kv(q, k, v, table, POSITIONS, SLOTS, *ours, interleaved=interleaved)
    else:
        reference.write_kv(turned_k, v, *theirs, SLOTS, *scales_reference)
        rope_write_kv(
            q, k, v, table, POSITIONS, SLOTS, *ours, interleaved=interleaved, k_scale=scales[0], v_scale=scales[1]
        )
        assert same(scales[0], scales_reference[0]) and same(scales[1], scales_reference[1])
    assert torch.equal(q, turned_q)
    assert same(ours[0], theirs[0]) and same(ours[1], theirs[1])


def test_strided_rows_of_one_projection() -> None:
    """q, k and v are views of one qkv matrix in the model."""
    qkv = torch.randn(7, 10, 64)
    q, k, v = qkv.split([6, 2, 2], dim=1)
    table = reference.rotary_table(100, 64)
    wanted_q, wanted_k = reference.rotate(q, POSITIONS, table), reference.rotate(k, POSITIONS, table)
    k_cache, v_cache = poisoned(4, 2, 16, 64, dtype=torch.float32), poisoned(4, 2, 16, 64, dtype=torch.float32)
    rope_write_kv(q, k, v, table, POSITIONS, SLOTS, k_cache, v_cache)
    assert torch.equal(q, wanted_q)
    assert torch.equal(k_cache[1, :, 1], wanted_k[3]) and torch.equal(v_cache[3, :, 15], v[4])


def test_bad_arguments_are_refused() -> None:
    q, k, v = torch.randn(7, 6, 64), torch.randn(7, 2, 64), torch.randn(7, 2, 64)
    cache = poisoned(4, 2, 16, 64, dtype=torch.float32)
    with pytest.raises(ValueError, match="table"):
        rope_write_kv(q, k, v, reference.rotary_table(100, 66), POSITIONS, SLOTS, cache, cache)
    table = reference.rotary_table(100, 64)
    with pytest.raises(ValueError, match="KV dtype"):
        rope_write_kv(q, k, v, table, POSITIONS, SLOTS, cache.half(), cache.half())
    with pytest.raises(ValueError, match="needs k_scale"):
        rope_write_kv(q, k, v, table, POSITIONS, SLOTS, cache.to(FP8[0]), cache.to(FP8[0]))
