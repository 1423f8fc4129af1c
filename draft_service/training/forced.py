"""The target's hidden states of text that is there already, such as logged answers: read, not written.

A slice's drafts are computed as they stand, right or wrong, so the states of an answer's rows come from slices that
draft the answer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from draft_service.training.generate import Talk
from tandem.lm.types import Runner, SamplingParams, Slice, SliceOutput
from tandem.lm.types import Sequence as Tokens

_GREEDY = SamplingParams(temperature=0.0)
# Prompt tokens, and answer tokens behind the first, of one conversation in a step.
_CHUNK = 256
_DRAFTS = 31
_BATCH = 4


class ForcedError(ValueError):
    """A conversation that the target's KV cache does not hold."""


@dataclass(slots=True)
class _Reading:
    """One conversation on its way through the model: KV of ids[:computed] is there."""

    talk: Talk
    blocks: list[int]
    computed: int = 0
    rows: list[np.ndarray] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.computed >= len(self.talk[1]) - 1

    def slice(self) -> Slice:
        index, ids, first = self.talk
        # The row of the last prompt token gives the first answer token.
        prompt = first - 1 - self.computed
        if prompt > 0:
            count = min(prompt, _CHUNK)
            sequence = Tokens(index, 0, _GREEDY, ids[:first], first)
            return Slice(sequence, self.blocks, self.computed, count, sample=False)
        sequence = Tokens(index, 0, _GREEDY, ids[: self.computed + 1], first)
        drafts = tuple(ids[self.computed + 1 : len(ids) - 1][:_DRAFTS])
        return Slice(sequence, self.blocks, self.computed, 1, drafts, hidden=True)

    def take(self, piece: Slice, output: SliceOutput) -> None:
        self.computed = piece.start + piece.count + len(piece.drafts)
        if output.hidden is not None:
            self.rows.append(output.hidden.astype(np.float16))


def read_states(runner: Runner, talks: Sequence[Talk], keep: Callable[[np.ndarray], None]) -> None:
    """Calls `keep` with the states of each answer, fp16 [answer tokens, hidden], in order.

    Raises:
        ForcedError: a conversation is longer than the model's context or KV cache.
        ValueError: the runner gives no hidden states.
    """
    size, blocks = runner.spec.block_size, runner.spec.num_blocks
    start = 0
    while start < len(talks):
        group: list[_Reading] = []
        free = 0
        for talk in talks[start : start + _BATCH]:
            need = -(-len(talk[1]) // size)
            if need > blocks - free:
                break
            group.append(_Reading(talk, list(range(free, free + need))))
            free += need
        if not group or any(len(reading.talk[1]) > runner.spec.max_model_len for reading in group):
            longest = max(len(talk[1]) for talk in talks[start : start + _BATCH])
            raise ForcedError(
                f"a logged request has {longest} tokens, but the target's KV cache holds {blocks * size} "
                f"and its context {runner.spec.max_model_len}"
            )
        _run(runner, group)
        for reading in group:
            keep(np.concatenate(reading.rows))
        start += len(group)


def _run(runner: Runner, group: list[_Reading]) -> None:
    while active := [reading for reading in group if not reading.done]:
        pieces = [reading.slice() for reading in active]
        for reading, piece, output in zip(active, pieces, runner.execute(pieces), strict=True):
            reading.take(piece, output)
    for reading in group:
        runner.forget(reading.talk[0])
