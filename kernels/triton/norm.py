"""RMSNorm, with the residual addition fused, and the gated activations of MLPs.

Arithmetic is fp32, one program per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.interpreter import correct_interpreter

correct_interpreter()

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
# Columns of one program of the activation kernel.
ACTIVATION_BLOCK = 1024
MAX_NORM_WIDTH = 32768


@triton.jit
def rms_norm_kernel(
    out,
    x,
    residual,
    weight,
    width,
    eps,
    stride_out,
    stride_x,
    stride_residual,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = x / sqrt(mean(x²) + eps) · weight, with x += residual (stored back to residual) first. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * stride_residual + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * stride_residual + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    mean_square = tl.sum(value * value, 0) / width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = value / tl.sqrt(mean_square + eps) * scale
    tl.store(out + row * stride_out + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activation_and_mul_kernel(
    out,
    gate_up,
    width,
    stride_out,
    stride_gate_up,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = activation(gate) · up for rows that hold gate and up side by side. Grid: (rows, width / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * stride_gate_up + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_gate_up + width + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == 1:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh(x) = 1 − 2 / (e^2x + 1), right at both ends.
        active = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))
    tl.store(out + row * stride_out + columns, (active * up).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467) over the last dimension of x [N, D]; weight [D].

    With `residual` [N, D], residual becomes x + residual (rounded to its dtype) and that is normalised.
    Raises ValueError for other shapes, for rows that are not contiguous, and for D above 32,768.
    """
    if x.dim() != 2 or weight.shape != x.shape[1:] or (residual is not None and residual.shape != x.shape):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}")
    if x.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("rows of x and residual must be contiguous")
    rows, width = x.shape
    if width > MAX_NORM_WIDTH:
        raise ValueError(f"width {width} is above {MAX_NORM_WIDTH}")
    out = torch.empty_like(x) if out is None else out
    if rows == 0:
        return out
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(rows,)](
        out,
        x,
        x if residual is None else residual,
        weight,
        width,
        eps,
        out.stride(0),
        x.stride(0),
        0 if residual is None else residual.stride(0),
        HAS_RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


def activation_and_mul(gate_up: torch.Tensor, activation: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """activation(gate) · up for gate_up [N, 2·I] = gate | up; activation is silu, gelu (erf) or gelu_tanh. → [N, I].

    Raises ValueError for an unknown activation, an odd width, or rows that are not contiguous.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} is not [N, 2·I] with contiguous rows")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    if rows == 0:
        return out
    activation_and_mul_kernel[(rows, triton.cdiv(width, ACTIVATION_BLOCK))](
        out,
        gate_up,
        width,
        out.stride(0),
        gate_up.stride(0),
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK=ACTIVATION_BLOCK,
    )
    return out
