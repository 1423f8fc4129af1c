"""RMSNorm and gated activations in plain torch."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dim (arXiv 1910.07467), in fp32 or wider, returned in x's dtype.

    With `residual`, residual becomes x + residual first (in place, rounded to its dtype) and that is normalised.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    value = x.to(wide)
    if residual is not None:
        residual.copy_(value + residual.to(wide))
        value = residual.to(wide)
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.to(wide)).to(x.dtype)


def activation_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) · up for gate_up [N, 2·I] = gate | up; activation is silu, gelu or gelu_tanh. → [N, I]."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    if activation == "silu":
        active = torch.nn.functional.silu(gate)
    elif activation in ("gelu", "gelu_tanh"):
        active = torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    else:
        raise ValueError(f"activation {activation!r} is not one of silu, gelu, gelu_tanh")
    return (active * up).to(gate_up.dtype)
