"""A draft head in one native call: whole chains of drafts for several sequences, with the sampler's noise."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from kernels.cpu import abi, library
from kernels.cpu.tiles import TileWeight

CLAIMS = abi.CLAIMS


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """A head of `hidden` numbers and an MLP of `inner`; see tandem.lm.proposers.head_net for its arithmetic."""

    enter: TileWeight
    # [2 · inner, 2 · hidden] if up is None: both, gate first.
    gate: TileWeight
    up: TileWeight | None
    down: TileWeight
    out: TileWeight
    # fp32 [hidden] of state, token and output.
    gains: tuple[np.ndarray, np.ndarray, np.ndarray]
    # int32 [out.n], ascending: the target's ids of the outputs.
    ids: np.ndarray
    eps: float

    @property
    def hidden(self) -> int:
        return self.enter.n

    @property
    def inner(self) -> int:
        return self.down.k


@dataclass(frozen=True, slots=True)
class Chain:
    """Drafts wanted for one sequence."""

    # fp32 [hidden], contiguous: the target's state whose logits gave `token`.
    hidden: np.ndarray
    token: int
    most: int
    # Temperature, top_p, min_p, top_k, seed, position of the first draft, choice, purpose: as in sampling.SAMPLE.
    sample: tuple[float, float, float, int, int, int, int, int]
    # fp32 [2, CLAIMS, 2]: chance that a draft is right = [0] + [1] · claim, by step of the claim; of the first draft
    # and of later ones.
    trust: np.ndarray | None = None
    # fp32 [≥ most]: after draft i the chain goes on while the chance that all are right is greater than this.
    least: np.ndarray | None = None


class DraftHead:
    """Bound to its weights and the target's embedding. One thread calls it; a call keeps the GIL."""

    def __init__(self, weights: HeadWeights, embed: TileWeight) -> None:
        """Raises ValueError on shapes that do not fit each other, MemoryError without memory."""
        hidden, inner = weights.hidden, weights.inner
        stacked = weights.up is None
        shapes = {
            "enter": (weights.enter, hidden, hidden),
            "gate": (weights.gate, 2 * inner if stacked else inner, 2 * hidden),
            "up": (weights.up or weights.gate, 2 * inner if stacked else inner, 2 * hidden),
            "down": (weights.down, hidden, inner),
            "out": (weights.out, len(weights.ids), hidden),
            "embed": (embed, embed.n, hidden),
        }
        for name, (tile, n, k) in shapes.items():
            if (tile.n, tile.k) != (n, k):
                raise ValueError(f"{name} must be [{n}, {k}], got [{tile.n}, {tile.k}]")
        if weights.ids.dtype != np.int32 or (np.diff(weights.ids) <= 0).any() or weights.ids[0] < 0:
            raise ValueError("ids must be int32 and ascend from 0 or more")
        if weights.ids[-1] >= embed.n:
            raise ValueError(f"id {weights.ids[-1]} has no embedding among {embed.n}")
        self._hidden, self._embedded = hidden, embed.n
        # What the native side points to.
        self._keep = weights, embed, [np.ascontiguousarray(gain, np.float32) for gain in weights.gains]
        view = abi.Head()
        view.gate, view.down, view.out = weights.gate.struct(), weights.down.struct(), weights.out.struct()
        view.embed = embed.struct()
        setattr(view, "in", weights.enter.struct())
        if weights.up is not None:
            view.up = weights.up.struct()
        view.g_s, view.g_e, view.g_o = (gain.ctypes.data for gain in self._keep[2])
        view.ids = weights.ids.ctypes.data
        view.hidden, view.inner, view.eps = hidden, inner, weights.eps
        self._library = library()
        self._handle = self._library.td_head_new(ctypes.byref(view))
        if not self._handle:
            raise MemoryError("no memory for a draft head")
        self._chains = (abi.Chain * 0)()

    def draft(self, chains: list[Chain]) -> list[tuple[list[int], list[float]]]:
        """Ids and claims (their probability at temperature 1) per chain; fewer than `most` where a chain ended.

        Raises ValueError on arrays of other types and tokens that do not exist.
        """
        if len(chains) > len(self._chains):
            self._chains = (abi.Chain * len(chains))()
        most = max((chain.most for chain in chains), default=0)
        ids, claims = np.empty((len(chains), most), np.int32), np.empty((len(chains), most), np.float32)
        for row, (chain, view) in enumerate(zip(chains, self._chains, strict=False)):
            self._check(chain)
            view.hidden = chain.hidden.ctypes.data
            view.trust = None if chain.trust is None else chain.trust.ctypes.data
            view.least = None if chain.least is None else chain.least.ctypes.data
            view.ids, view.claims = ids.ctypes.data + 4 * row * most, claims.ctypes.data + 4 * row * most
            sample = view.sample
            sample.temperature, sample.top_p, sample.min_p, sample.top_k = chain.sample[:4]
            sample.seed, sample.position, sample.choice, sample.purpose = chain.sample[4:]
            view.token, view.most = chain.token, chain.most
        self._library.held.td_head_draft(self._handle, self._chains, len(chains))
        counts = [view.count for view, _ in zip(self._chains, chains, strict=False)]
        return [(ids[row, :n].tolist(), claims[row, :n].tolist()) for row, n in enumerate(counts)]

    def _check(self, chain: Chain) -> None:
        sizes = {
            "hidden": (chain.hidden, self._hidden),
            "trust": (chain.trust, 4 * CLAIMS),
            "least": (chain.least, chain.most),
        }
        for name, (array, size) in sizes.items():
            if array is not None and (array.dtype != np.float32 or array.size < size or not array.flags.c_contiguous):
                raise ValueError(f"{name} must be {size} contiguous fp32 numbers, got {array.dtype} {array.shape}")
        if not 0 <= chain.token < self._embedded:
            raise ValueError(f"token {chain.token} is not below {self._embedded}")

    def close(self) -> None:
        if getattr(self, "_handle", None):
            self._library.td_head_free(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()
