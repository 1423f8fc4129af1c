"""AWQ and GPTQ 4-bit matrices, unpacked to fp32 [out, in].

AWQ (Lin et al. 2023, "gemm" layout): qweight int32 [in, out / 8], qzeros int32 [in / group, out / 8], scales
[in / group, out]; the eight nibbles of a word, lowest first, are outputs 0 2 4 6 1 3 5 7. weight = (q - zero) · scale.
GPTQ (Frantar et al. 2022): qweight int32 [in / 8, out], eight inputs per word, lowest first; qzeros int32
[groups, out / 8], lowest first, stored minus one in checkpoint format v1; g_idx [in] names each input's group.
"""

from __future__ import annotations

import torch

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., n] → int32 [..., n, 8] with values 0 to 15, lowest nibble first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (words.to(torch.int32).unsqueeze(-1) >> shifts) & 15


def _awq_values(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, out / 8] → int32 [rows, out] with outputs in order."""
    nibbles = _nibbles(words)
    ordered = torch.empty_like(nibbles)
    ordered[..., list(_AWQ_ORDER)] = nibbles
    return ordered.flatten(-2)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def unpack_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """fp32 [out, in] from AWQ tensors. Raises ValueError if the shapes do not fit together."""
    inputs, out = qweight.shape[0], qweight.shape[1] * 8
    group = inputs if group_size == -1 else group_size
    _check(inputs % group == 0, f"{inputs} inputs are not a multiple of the group size {group}")
    groups = inputs // group
    _check(tuple(scales.shape) == (groups, out), f"scales are {tuple(scales.shape)}, expected {(groups, out)}")
    _check(
        tuple(qzeros.shape) == (groups, out // 8), f"qzeros are {tuple(qzeros.shape)}, expected {(groups, out // 8)}"
    )
    values = _awq_values(qweight).view(groups, group, out)
    zeros = _awq_values(qzeros).view(groups, 1, out)
    weight = (values - zeros).float() * scales.float().view(groups, 1, out)
    return weight.view(inputs, out).t().contiguous()


def unpack_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    group_size: int,
    zero_offset: bool = True,
) -> torch.Tensor:
    """fp32 [out, in] from GPTQ tensors; `zero_offset`: zeros are stored minus one (checkpoint format v1).

    Raises:
        ValueError: the shapes or group indices do not fit together.
    """
    inputs, out = qweight.shape[0] * 8, qweight.shape[1]
    group = inputs if group_size == -1 else group_size
    if g_idx is None or not bool(g_idx.any()):
        g_idx = torch.arange(inputs) // group
    groups = scales.shape[0]
    _check(tuple(scales.shape) == (groups, out), f"scales are {tuple(scales.shape)}, expected {(groups, out)}")
    _check(
        tuple(qzeros.shape) == (groups, out // 8), f"qzeros are {tuple(qzeros.shape)}, expected {(groups, out // 8)}"
    )
    _check(tuple(g_idx.shape) == (inputs,), f"g_idx is {tuple(g_idx.shape)}, expected {(inputs,)}")
    low, high = int(g_idx.min()), int(g_idx.max())
    _check(low >= 0 and high < groups, f"g_idx spans {low} to {high}, but there are {groups} groups")
    values = _nibbles(qweight).permute(0, 2, 1).reshape(inputs, out)
    zeros = _nibbles(qzeros).flatten(-2)
    if zero_offset:
        # Stored minus one, and stored in four bits.
        zeros = zeros + 1
    index = g_idx.long()
    weight = (values - zeros[index]).float() * scales.float()[index]
    return weight.t().contiguous()
