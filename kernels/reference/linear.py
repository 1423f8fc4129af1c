"""Linears over quantised weights in plain torch: dequantise, then multiply in fp64 or fp32."""

from __future__ import annotations

import torch

from kernels.packing import HALF_K, PackedWeight


def dequantise(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight [N, K] in `dtype`: (code − zero) · scale + minimum in fp32, in the order of the inputs."""
    if weight.bits == 4:
        tiles = weight.codes.view(-1, HALF_K, weight.out_features)
        codes = torch.stack([tiles & 0xF, tiles >> 4], dim=1).reshape(-1, weight.out_features)
    else:
        codes = weight.codes
    value = codes[: weight.in_features].to(torch.float32)
    groups = torch.arange(weight.in_features, device=value.device) // weight.group_size
    if weight.zeros is not None:
        value = value - weight.zeros.to(torch.float32)[groups]
    value = value * weight.scales.to(torch.float32)[groups]
    if weight.minimums is not None:
        value = value + weight.minimums.to(torch.float32)[groups]
    if weight.permutation is not None:
        ordered = torch.empty_like(value)
        ordered[weight.permutation[: weight.in_features].long()] = value
        value = ordered
    return value.T.to(dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ + bias in fp64. → fp64 [M, N]."""
    out = x.to(torch.float64) @ weight.to(torch.float64).T
    return out if bias is None else out + bias.to(torch.float64)


def quant_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times the dequantised weight, rounded to x's dtype as the kernel does, in fp64. → fp64 [M, N]."""
    return linear(x, dequantise(weight, x.dtype), bias)


def linear_w8a8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] · weight [N, K]ᵀ · x_scale [M] · w_scale [N] + bias in fp64. → fp64 [M, N]."""
    out = linear(x, weight) * x_scale.to(torch.float64)[:, None] * w_scale.to(torch.float64)[None, :]
    return out if bias is None else out + bias.to(torch.float64)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] → (codes of `dtype`, scales fp32 [M]): scale = max|x| / limit, round to nearest even."""
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.to(torch.float32)
    scales = wide.abs().amax(dim=1).clamp_min(1e-12) / limit
    value = (wide / scales[:, None]).clamp(-limit, limit)
    return (value.round() if dtype == torch.int8 else value).to(dtype), scales
