"""Swaps modules of a transformers model for versions whose rows do not depend on the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tandem.lm import ops

# Rows per call of a rotary module: few enough that one thread takes them all.
_ROTARY_ROWS = 32


class TileLinear(nn.Module):
    """nn.Linear over tiles of a fixed number of rows. Input [..., in] with a multiple of ops.ROW_TILE rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        out = ops.linear(ops.pad_rows(flat), self.weight, self.bias)[:rows]
        return out.view(*x.shape[:-1], -1)


class FlatActivation(nn.Module):
    """An elementwise activation, applied chunk by chunk."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.apply_flat(
            lambda chunk: chunk.copy_(self.inner(chunk)), x.clone(memory_format=torch.contiguous_format)
        )


class PagedRotary(nn.Module):
    """A rotary table computed a few positions at a time."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = [self.inner(x, part, *args, **kwargs) for part in position_ids.split(_ROTARY_ROWS, dim=-1)]
        if isinstance(parts[0], tuple):
            return tuple(torch.cat(column, dim=-2) for column in zip(*parts, strict=True))
        return torch.cat(parts, dim=-2)


def replace_modules(model: nn.Module) -> str:
    """Replaces linears, activations and rotary modules in place.

    Returns what is left that multiplies matrices in its own way (such as stacked experts), empty if nothing is.
    """
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, TileLinear(child.weight.data, None if child.bias is None else child.bias.data))
            elif isinstance(child, Conv1D):
                # Its weight is [in, out].
                setattr(parent, name, TileLinear(child.weight.data.t().contiguous(), child.bias.data))
            elif _is_activation(child):
                setattr(parent, name, FlatActivation(child))
            elif hasattr(child, "inv_freq") and not list(child.children()):
                setattr(parent, name, PagedRotary(child))
    known = (TileLinear, nn.Embedding)
    for name, module in model.named_modules():
        if isinstance(module, known):
            continue
        for key, value in module.named_parameters(recurse=False):
            if value.dim() > 1:
                return f"{name}.{key} is multiplied by code of the model's own ({type(module).__name__})"
    return ""


def _is_activation(module: nn.Module) -> bool:
    """Elementwise functions without parameters."""
    if any(True for _ in module.parameters()):
        return False
    home = type(module).__module__
    elementwise = home == "transformers.activations" or home == "torch.nn.modules.activation"
    return elementwise and not isinstance(module, nn.Softmax | nn.MultiheadAttention)
