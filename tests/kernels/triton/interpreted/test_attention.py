"""Paged attention against the torch reference in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.reference import attention as reference
from kernels.triton.attention import AttentionBatch, paged_attention
from kernels.triton.configs import Tile
from tests.kernels.triton.interpreted.cases import PagedCase, paged_case, tolerance

SMALL = Tile(block_m=16, block_n=32)


def check(case: PagedCase, dtype: torch.dtype = torch.float32, **options: object) -> torch.Tensor:
    """Compares a run into a poisoned output with the reference; rows that no sequence owns do not exist here."""
    launch = {"deterministic": True, "split_size": 64, "parallel_splits": False, "config": SMALL}
    meaning = {key: value for key, value in options.items() if key in ("window", "softcap", "sinks")}
    out = torch.full_like(case.q, float("nan"))
    scale = case.q.shape[-1] ** -0.5
    paged_attention(
        case.q, case.k_cache, case.v_cache, case.batch, scale=scale, out=out, **case.scales, **(launch | options)
    )
    wanted = reference.paged_attention(*case.reference_args, scale=scale, **case.scales, **meaning)
    assert not torch.isnan(out).any()
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance(dtype), atol=tolerance(dtype))
    return out


RAGGED = ([0, 1, 15, 16, 17, 70], [0, 1, 15, 1, 5, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parallel", [False, True])
def test_ragged_lengths(dtype: torch.dtype, parallel: bool) -> None:
    check(paged_case(*RAGGED, dtype=dtype), dtype, parallel_splits=parallel, split_size=32)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    check(paged_case([33, 9], [2, 9], head_dim=head_dim, q_heads=4, kv_heads=2))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_block_sizes(block_size: int) -> None:
    lengths = [block_size - 1, block_size, block_size + 1]
    check(paged_case(lengths, [1, 2, 3], block_size=block_size))


@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (9, 3), (32, 1)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    rows = Tile(block_m=max(16, heads[0] // heads[1]), block_n=32)
    check(paged_case([20, 3], [3, 1], q_heads=heads[0], kv_heads=heads[1]), config=rows)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{"window": 1}, {"window": 20}, {"softcap": 2.0}, {"window": 33, "softcap": 5.0}])
def test_window_and_softcap(options: dict[str, float], deterministic: bool) -> None:
    check(paged_case([70, 40, 5], [2, 9, 5]), deterministic=deterministic, split_size=32, **options)


@pytest.mark.parametrize("parallel", [False, True])
def test_sinks(parallel: bool) -> None:
    sinks = torch.tensor([0.5, -3.0, 4.0, 20.0, 0.0, -100.0])
    check(paged_case([70, 4], [1, 2]), sinks=sinks, parallel_splits=parallel, split_size=32)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_kv(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    check(paged_case([40, 17], [1, 4], dtype=dtype, kv_dtype=kv_dtype), dtype)


def test_empty_batch() -> None:
    case = paged_case([3], [0])
    assert paged_attention(case.q, case.k_cache, case.v_cache, case.batch, scale=1.0).shape == (0, 6, 64)
    batch = AttentionBatch(
        torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32), 0, 0
    )
    assert paged_attention(case.q, case.k_cache, case.v_cache, batch, scale=1.0).shape == (0, 6, 64)


def test_rows_behind_the_last_sequence_stay() -> None:
    """A captured graph runs with padding rows: they must not be touched, nor disturb the rest."""
    case = paged_case([20, 5], [1, 1])
    padded = torch.cat([case.q, torch.full((3, *case.q.shape[1:]), float("nan"))])
    for parallel in (False, True):
        out = torch.full_like(padded, 7.0)
        options = {"scale": 0.125, "split_size": 32, "config": SMALL, "parallel_splits": parallel}
        paged_attention(padded, case.k_cache, case.v_cache, case.batch, out=out, **options)
        alone = paged_attention(case.q, case.k_cache, case.v_cache, case.batch, **options)
        assert torch.equal(out[:2], alone) and bool((out[2:] == 7.0).all())


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"window": 50, "softcap": 3.0}),
        (torch.bfloat16, {}),
        pytest.param(torch.float32, {}, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, {"window": 50, "softcap": 3.0}, marks=pytest.mark.slow),
    ],
)
def test_deterministic_mode_is_batch_invariant(dtype: torch.dtype, options: dict[str, float]) -> None:
    """The last rows of a sequence: in one prefill, in verification beside others, alone.

    Splits in order and parallel.
    """
    case = paged_case([70, 7, 33], [70, 7, 4], q_heads=2, kv_heads=1, dtype=dtype)
    batch = case.batch
    launch = {"scale": 0.125, "split_size": 32, "config": SMALL, **options}
    whole = paged_attention(case.q, case.k_cache, case.v_cache, batch, parallel_splits=False, **launch)
    for parallel in (False, True):
        again = paged_attention(case.q, case.k_cache, case.v_cache, batch, parallel_splits=parallel, **launch)
        assert torch.equal(whole, again)
        for rows in (1, 3):
            alone = AttentionBatch(
                torch.tensor([0, rows], dtype=torch.int32), batch.context_lens[:1], batch.block_tables[:1], rows, 70
            )
            tail = paged_attention(
                case.q[70 - rows : 70], case.k_cache, case.v_cache, alone, parallel_splits=parallel, **launch
            )
            assert torch.equal(tail, whole[70 - rows : 70])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_drawn_cases(data: st.DataObject) -> None:
    contexts = data.draw(st.lists(st.integers(0, 80), min_size=1, max_size=4))
    queries = [data.draw(st.integers(0, min(length, 20))) for length in contexts]
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    case = paged_case(
        contexts,
        queries,
        q_heads=kv_heads * data.draw(st.sampled_from([1, 2, 5])),
        kv_heads=kv_heads,
        head_dim=data.draw(st.sampled_from([64, 80])),
        block_size=data.draw(st.sampled_from([16, 32])),
        dtype=dtype,
    )
    options: dict[str, object] = {}
    if data.draw(st.booleans()):
        options["window"] = data.draw(st.integers(1, 90))
    if data.draw(st.booleans()):
        options["softcap"] = 4.0
    parallel = data.draw(st.booleans())
    deterministic = data.draw(st.booleans())
    check(case, dtype, parallel_splits=parallel, deterministic=deterministic, split_size=32, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window 0"),
        ({"softcap": -1.0}, "softcap -1.0"),
        ({"sinks": torch.zeros(5)}, "sinks"),
        ({"k_scale": torch.zeros(1)}, "fp8 KV needs"),
        ({"split_size": 33}, "split_size 33"),
    ],
)
def test_bad_options_are_refused(change: dict[str, object], message: str) -> None:
    case = paged_case([5], [1])
    with pytest.raises(ValueError, match=message):
        paged_attention(case.q, case.k_cache, case.v_cache, case.batch, **({"scale": 1.0, "config": SMALL} | change))


def test_bad_shapes_are_refused() -> None:
    case = paged_case([5], [1])
    with pytest.raises(ValueError, match="multiple of 2 KV heads"):
        paged_attention(case.q[:, :5], case.k_cache, case.v_cache, case.batch, scale=1.0)
    with pytest.raises(ValueError, match="KV dtype"):
        paged_attention(case.q.half(), case.k_cache, case.v_cache, case.batch, scale=1.0)
    odd = case.k_cache[:, :, :12]
    with pytest.raises(ValueError, match="block size 12"):
        paged_attention(case.q, odd, odd, case.batch, scale=1.0)
