"""Heads for tests: of random weights, and such as know what comes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from engine_service.speculation.client import NoClient
from engine_service.speculation.control import LengthControl, Offer
from engine_service.speculation.controller import DraftSpeculation, SpeculationOptions
from engine_service.speculation.head import HeadState
from tandem.lm.proposers.head import HeadProposer, HeadRun
from tandem.lm.proposers.head_file import HeadFile, Matrix, quantize
from tandem.lm.types import ModelSpec, Sequence


def random_head(spec: ModelSpec, kind: str = "F32", inner: int = 64, vocab: int = 0, seed: int = 0) -> HeadFile:
    """Random weights for a model; vocab: ids that it knows, 0: all."""
    rng = np.random.default_rng(seed)
    hidden, known = spec.hidden_size, vocab or spec.vocab_size

    def matrix(n: int, k: int) -> Matrix:
        return quantize(rng.standard_normal((n, k)).astype(np.float32) / np.float32(k) ** 0.5, kind)

    def gain() -> np.ndarray:
        return rng.uniform(0.5, 1.5, hidden).astype(np.float32)

    return HeadFile(
        target_digest=spec.model_digest,
        target_vocab=spec.vocab_size,
        w_in=matrix(hidden, hidden),
        w_gate=matrix(inner, 2 * hidden),
        w_up=matrix(inner, 2 * hidden),
        w_down=matrix(hidden, inner),
        w_out=matrix(known, hidden),
        g_s=gain(),
        g_e=gain(),
        g_o=gain(),
        ids=np.sort(rng.choice(spec.vocab_size, known, replace=False)).astype(np.int32),
    )


class Oracle:
    """Stands for a HeadProposer: drafts what `rest` says will follow a sequence, or something else at each place."""

    name = HeadProposer.name

    def __init__(self, rest: Callable[[Sequence], list[int]], vocab: int, right: bool = True) -> None:
        self._rest, self._vocab, self._right = rest, vocab, right
        self.hidden: list[np.ndarray] = []

    def draft(self, runs: list[HeadRun]) -> None:
        for run in runs:
            self.hidden.append(run.hidden)
            for token in self._rest(run.sequence)[: run.most]:
                run.ids.append(token if self._right else (token + 1) % self._vocab)
                run.claims.append(0.9)
                if not run.goes_on:
                    break


class EagerControl(LengthControl):
    """Runs all that is offered."""

    def seek(self, batch: int, chance: float) -> bool:
        return True

    def allocate(self, batch: int, offers: Seq[Offer]) -> dict[int, int]:
        return {offer.sequence_id: len(offer.chances) for offer in offers}


def eager(proposer: object, vocab_size: int, rejection: bool = False, most: int = 3) -> DraftSpeculation:
    """Speculation that runs every draft of a head, whether it pays or not."""
    options = SpeculationOptions(vocab_size=vocab_size, rejection=rejection)
    speculation = DraftSpeculation(NoClient(), options, head=proposer)  # type: ignore[arg-type]
    head = speculation.head
    assert head is not None

    def plan(wishes: list[tuple[HeadState, Sequence, int]], batch: int, cost: object) -> list[int]:
        return [min(most, room) if head.ready(state, sequence) else 0 for state, sequence, room in wishes]

    head.plan = plan  # type: ignore[method-assign,assignment]
    head._pursuit = lambda *args: None  # type: ignore[method-assign,assignment,return-value]
    head.chances = lambda run, state=None: (0.95,) * len(run.ids)  # type: ignore[method-assign]
    speculation.control = EagerControl()
    return speculation
