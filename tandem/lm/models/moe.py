"""Mixture of experts: a router picks experts per token; experts are summed in ascending id, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tandem.lm import ops
from tandem.lm.weights import WeightSource


class Experts:
    """The experts of one layer: gate and up stacked [experts, 2 · intermediate, hidden], down [experts, hidden, …]."""

    def __init__(
        self,
        source: WeightSource,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        config, stem = source.config, f"layers.{layer}"
        self.top_k, self.normalize = config.experts_per_token, config.normalize_expert_weights
        self.activation = activation
        self.router = source.tensor(f"{stem}.router.weight", dtype).to(device)
        inter, hidden = config.expert_intermediate_size, config.hidden_size
        self.gate_up = torch.empty(config.num_experts, 2 * inter, hidden, dtype=dtype, device=device)
        self.down = torch.empty(config.num_experts, hidden, inter, dtype=dtype, device=device)
        for expert in range(config.num_experts):
            self.gate_up[expert, :inter] = source.tensor(f"{stem}.experts.{expert}.gate.weight", dtype)
            self.gate_up[expert, inter:] = source.tensor(f"{stem}.experts.{expert}.up.weight", dtype)
            self.down[expert] = source.tensor(f"{stem}.experts.{expert}.down.weight", dtype)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights fp32 and expert ids, both [rows, top_k]."""
        scores = ops.linear(x, self.router).float()
        scores = ops.exp_(scores - scores.amax(-1, keepdim=True))
        chosen, experts = (scores / scores.sum(-1, keepdim=True)).topk(self.top_k, dim=-1)
        if self.normalize:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen, experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self._route(x)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(experts).tolist():
            rows, rank = (experts == expert).nonzero(as_tuple=True)
            gate, up = ops.linear(ops.pad_rows(x[rows]), self.gate_up[expert]).chunk(2, dim=-1)
            result = ops.linear(self.activation(gate.contiguous()).mul_(up), self.down[expert])
            # One row meets an expert at most once, so this adds in ascending expert id.
            out[rows] += result[: len(rows)].float() * weights[rows, rank].unsqueeze(-1)
        return out.to(x.dtype)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.router, self.gate_up, self.down)
