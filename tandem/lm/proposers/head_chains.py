"""Whole chains of a head's drafts in one native call: no Python between two tokens of a chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tandem.lm.noise import Purpose
from tandem.lm.proposers.head_net import CompiledNet, HeadNet
from tandem.lm.types import Runner

if TYPE_CHECKING:
    from tandem.lm.proposers.head import HeadRun


class CompiledChains:
    """Chains of a head on the compiled kernels, which share its tiles and the target's embedding."""

    def __init__(self, net: CompiledNet, embedding: object) -> None:
        """embedding: the target's, in tiles. Raises ValueError if it does not fit the head."""
        from kernels.cpu.draft_head import DraftHead
        from kernels.cpu.tiles import TileWeight

        assert isinstance(embedding, TileWeight)
        self._head = DraftHead(net.weights, embedding)

    def draft(self, runs: list[HeadRun]) -> None:
        """Fills ids and claims of runs that are neither drawn for rejection nor processed before sampling."""
        from kernels.cpu.draft_head import Chain

        asked = []
        for run in runs:
            sequence, pursuit = run.sequence, run.pursuit
            params = sequence.params
            cuts = (params.temperature, params.top_p, params.min_p, params.top_k)
            key = (params.seed, sequence.output_len, sequence.choice, int(Purpose.SAMPLE))
            hidden = np.ascontiguousarray(run.hidden, np.float32)
            trust, least = (pursuit.trust, pursuit.least) if pursuit is not None else (None, None)
            asked.append(Chain(hidden, sequence.token_ids[-1], run.most, (*cuts, *key), trust, least))
        for run, (ids, claims) in zip(runs, self._head.draft(asked), strict=True):
            run.ids, run.claims = ids, claims


def compiled_chains(net: HeadNet, runner: Runner) -> CompiledChains | None:
    """None where the head or the target does not run on the compiled kernels."""
    # Only runners on those kernels have it.
    embedding = getattr(runner, "embedding_tiles", None)
    if embedding is None or not isinstance(net, CompiledNet):
        return None
    return CompiledChains(net, embedding)
