"""Torch operations whose result for a row does not depend on how many rows there are, nor on where the row stands.

Everything works on a number of rows that is a multiple of ROW_TILE. Two things break invariance in plain torch: matrix
products choose their kernel by the number of rows, and elementwise functions treat the tail of a thread's share with
scalar code that rounds differently. So products run over tiles of exactly ROW_TILE rows, and transcendental functions
run over flat chunks that one thread handles with full vectors only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ROW_TILE = 16
# Below torch's parallel grain (32,768), so that one thread takes a whole chunk.
_CHUNK = 16_384
# Two vectors of the widest ISA: the step of torch's vector loop.
_VECTOR_STEP = 64


def padded(count: int, multiple: int = ROW_TILE) -> int:
    """Smallest multiple that holds `count`, at least one."""
    return max(1, -(-count // multiple)) * multiple


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Zero rows appended up to a multiple of ROW_TILE."""
    missing = padded(x.shape[0]) - x.shape[0]
    return x if not missing else F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] · weight [out, in]ᵀ + bias; rows must be a multiple of ROW_TILE. Result [rows, out] in x's dtype."""
    if x.is_cuda:
        return F.linear(x, weight, bias)
    rows, inputs = x.shape
    tiles = rows // ROW_TILE
    # A batch of products that share one weight (stride 0): each item has the same shape, whatever the batch.
    shared = weight.t().unsqueeze(0).expand(tiles, inputs, weight.shape[0])
    out = torch.bmm(x.reshape(tiles, ROW_TILE, inputs), shared).view(rows, -1)
    return out if bias is None else out.add_(bias)


def apply_flat(function_: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Applies an in-place elementwise function to a contiguous tensor, in place, chunk by chunk. Returns x."""
    if x.is_cuda:
        function_(x)
        return x
    flat = x.view(-1)
    whole = flat.numel() // _VECTOR_STEP * _VECTOR_STEP
    for start in range(0, whole, _CHUNK):
        function_(flat[start : min(start + _CHUNK, whole)])
    if rest := flat.numel() - whole:
        tail = F.pad(flat[whole:], (0, _VECTOR_STEP - rest))
        function_(tail)
        flat[whole:] = tail[:rest]
    return x


def exp_(x: torch.Tensor) -> torch.Tensor:
    """exp in place."""
    return apply_flat(torch.Tensor.exp_, x)


def tanh_(x: torch.Tensor) -> torch.Tensor:
    """tanh in place."""
    return apply_flat(torch.Tensor.tanh_, x)


def silu_(x: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(x) in place."""
    return apply_flat(lambda chunk: F.silu(chunk, inplace=True), x)


def gelu_tanh_(x: torch.Tensor) -> torch.Tensor:
    """Tanh form of GELU (Hendrycks and Gimpel 2016), in place."""
    return apply_flat(lambda chunk: chunk.copy_(F.gelu(chunk, approximate="tanh")), x)


def soft_cap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap · tanh(x / cap) in place."""
    return tanh_(x.div_(cap)).mul_(cap)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dimension (Zhang and Sennrich 2019) in fp32; result in x's dtype. Weight is fp32."""
    wide = x.float()
    # Square root and division are correctly rounded in vector and scalar code alike; rsqrt need not be.
    inverse = (wide.square().mean(-1, keepdim=True) + eps).sqrt().reciprocal()
    return (wide * inverse * weight).to(x.dtype)
