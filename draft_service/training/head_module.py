"""The head as it is trained: the arithmetic of tandem.lm.proposers.head in differentiable form, and its loss.

Distillation: cross-entropy against the target's own distribution (restricted to the head's vocabulary and to its
likeliest ids there), unrolled over a few steps with the target's tokens as inputs, as at inference while drafts are
right. The output matrix stays what it is in the target, already rounded as it will be stored, so that the rest learns
to live with the rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPS = 1e-6


class HeadModule(nn.Module):
    """Recurrent head: s = W_in h; then per token s += W_down(silu(W_gate z) · W_up z), z = (rms(s) g_s, rms(e) g_e)."""

    def __init__(self, hidden: int, intermediate: int, w_out: Tensor, scale: float, seed: int) -> None:
        """w_out: fp32 [vocab, hidden], kept; scale: root mean square of the target's hidden states."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, width: float) -> nn.Parameter:
            return nn.Parameter(width * torch.randn(rows, columns, generator=generator))

        self.w_in = nn.Parameter(torch.eye(hidden))
        self.w_gate = normal(intermediate, 2 * hidden, (2 * hidden) ** -0.5)
        self.w_up = normal(intermediate, 2 * hidden, (2 * hidden) ** -0.5)
        # Begins as the identity on the state: small, not zero, so that all matrices learn from the first step on.
        self.w_down = normal(hidden, intermediate, 0.1 * scale * intermediate**-0.5)
        self.g_s = nn.Parameter(torch.ones(hidden))
        self.g_e = nn.Parameter(torch.ones(hidden))
        self.g_o = nn.Parameter(torch.full((hidden,), scale))
        self.register_buffer("w_out", w_out)

    def start(self, hidden: Tensor) -> Tensor:
        """State fp32 [rows, hidden] of the target's hidden states."""
        return F.linear(hidden, self.w_in)

    def advance(self, state: Tensor, embedding: Tensor) -> Tensor:
        """The state after one more token, whose embedding is fp32 [rows, hidden]."""
        z = torch.cat((rms(state) * self.g_s, rms(embedding) * self.g_e), dim=-1)
        return state + F.linear(F.silu(F.linear(z, self.w_gate)) * F.linear(z, self.w_up), self.w_down)

    def logits(self, state: Tensor, w_out: Tensor) -> Tensor:
        """fp32 [rows, ids] over the rows of `w_out`: all of the head's, or some."""
        return F.linear(rms(state) * self.g_o, w_out)


def rms(x: Tensor) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()


def soft_cross_entropy(logits: Tensor, ids: Tensor, chances: Tensor) -> Tensor:
    """Mean over rows of −Σ chances · log softmax(logits)[ids]. ids int64, chances fp32, both [rows, k]."""
    picked = torch.gather(logits, 1, ids)
    weight = chances.sum(dim=1)
    return (weight * torch.logsumexp(logits, dim=1) - (chances * picked).sum(dim=1)).mean()
