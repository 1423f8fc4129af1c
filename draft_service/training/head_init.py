"""Where a head's training begins: the best linear guess of the target's next hidden state, in closed form.

With a gate that is nearly the same at every position the head's MLP is linear in z, so ridge regression of the change
of state on gate · z gives its up and down matrices at once. Positions share much of their hidden states' direction;
that is what makes such a gate.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from draft_service.training.head_module import HeadModule, rms
from draft_service.training.states import Corpus

# Argument of the gate at a position of average direction: silu(2) = 1.76.
_GATE = 2.0
_CHUNK = 4096


@torch.no_grad()
def warm_start(
    module: HeadModule, corpus: Corpus, embedding: Tensor, rows: int = 100_000, ridge: float = 1e-3, noise: float = 0.2
) -> None:
    """Fits w_gate, w_up and w_down to the first `rows` positions that have a next one.

    ridge: share of the features' mean power that is added to each one's. noise: spread of the gates' arguments, so that
    units come to differ. With fewer units than hidden numbers, the directions that explain most are kept (reduced-rank
    regression: Izenman, 1975); units beyond them stay as they were drawn.
    """
    places = np.flatnonzero(corpus.left >= 1)[:rows]
    hidden, inner = module.w_in.shape[0], module.w_gate.shape[0]
    mean = torch.zeros(hidden)
    for part in _chunks(places):
        mean += rms(_states(corpus, part)).sum(dim=0)
    mean /= len(places)
    gate = torch.cat((_GATE * mean / mean.square().sum(), torch.zeros(hidden)))
    gram, cross = torch.zeros(2 * hidden, 2 * hidden), torch.zeros(2 * hidden, hidden)
    for part in _chunks(places):
        states = _states(corpus, part)
        z = torch.cat((rms(states), rms(embedding[torch.from_numpy(corpus.tokens[part])])), dim=1)
        z *= F.silu(z @ gate)[:, None]
        gram += z.T @ z
        cross += z.T @ (_states(corpus, part + 1) - states)
    gram.diagonal().add_(ridge * float(gram.diagonal().mean()))
    weights = torch.linalg.solve(gram, cross)
    # Eigenvectors of the prediction's covariance, those of most power first.
    directions = torch.linalg.eigh(weights.T @ gram @ weights).eigenvectors.flip(1)
    units = min(inner, hidden)
    kept = directions[:, :units]
    # W_down · W_up = kept · keptᵀ · weightsᵀ, both factors of like size.
    scale = float((weights @ kept).std() / kept.std()) ** 0.5
    module.w_up[:units] = (weights @ kept).T / scale
    module.w_down[:, :units] = kept * scale
    spread = module.w_gate[:units] / module.w_gate[:units].std() * noise * (2 * hidden) ** -0.5
    module.w_gate[:units] = gate + spread


def _chunks(places: np.ndarray) -> list[np.ndarray]:
    return [places[start : start + _CHUNK] for start in range(0, len(places), _CHUNK)]


def _states(corpus: Corpus, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(corpus.hidden[rows].astype(np.float32))
