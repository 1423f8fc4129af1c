"""RMSNorm and gated activations against the torch reference."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import norm as reference
from kernels.triton.norm import ACTIVATIONS, activation_and_mul, rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# One unit in the last place of values up to 8.
CLOSE = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 6.5e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 64, 576, 1000])
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(dtype: torch.dtype, width: int, residual: bool) -> None:
    x, weight = torch.randn(3, width).to(dtype), torch.randn(width)
    ours = torch.randn(3, width).to(dtype) if residual else None
    theirs = ours.clone() if ours is not None else None
    out = torch.full_like(x, float("nan"))
    rms_norm(x, weight, 1e-5, ours, out)
    wanted = reference.rms_norm(x, weight, 1e-5, theirs)
    torch.testing.assert_close(out, wanted, rtol=CLOSE[dtype] / 8, atol=CLOSE[dtype])
    if ours is not None and theirs is not None:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("width", [1, 1024, 1500])
def test_activation_and_mul(dtype: torch.dtype, activation: str, width: int) -> None:
    gate_up = (torch.randn(2, 2 * width) * 3).to(dtype)
    out = torch.full((2, width), float("nan")).to(dtype)
    activation_and_mul(gate_up, activation, out)
    wanted = reference.activation_and_mul(gate_up, activation)
    torch.testing.assert_close(out, wanted, rtol=CLOSE[dtype] / 8, atol=CLOSE[dtype])


def test_extreme_gates_are_finite() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 1.0, 1.0]])
    for activation in ACTIVATIONS:
        torch.testing.assert_close(
            activation_and_mul(gate_up, activation), reference.activation_and_mul(gate_up, activation)
        )


def test_no_rows_and_bad_arguments() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert activation_and_mul(torch.empty(0, 8), "silu").shape == (0, 4)
    with pytest.raises(ValueError, match="'relu'"):
        activation_and_mul(torch.zeros(1, 8), "relu")
    with pytest.raises(ValueError, match="weight"):
        rms_norm(torch.zeros(1, 8), torch.ones(7), 1e-5)
