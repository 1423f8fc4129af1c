"""A model as proposer over real weights: a model that drafts for itself is always right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tandem.lm.proposers import DraftSampling, DraftSequence
from tandem.lm.proposers.model import ModelProposer
from tandem.lm.runner import ModelRunner
from tandem.lm.types import Runner, SamplingParams, Sequence, Slice

PROMPTS = [
    np.random.default_rng(seed).integers(3, 1000, length).tolist() for seed, length in ((1, 37), (2, 5), (3, 70))
]


class Borrowed:
    """The target's runner with a KV cache of its own, so that one set of weights serves both."""

    def __init__(self, runner: Runner) -> None:
        assert isinstance(runner, ModelRunner)
        self.spec = replace(runner.spec, num_blocks=60)
        self._runner, self._kv = runner, runner._new_kv(60)

    def execute(self, slices: list[Slice]):  # type: ignore[no-untyped-def]
        own, self._runner._kv = self._runner._kv, self._kv
        try:
            return self._runner.execute(slices)
        finally:
            self._runner._kv = own

    def forget(self, sequence_id: int) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=17), SamplingParams(0.8, 40, 0.9, seed=3)],
    ids=["greedy", "sampled", "truncated"],
)
def test_its_own_draft_is_accepted_whole(tiny: Runner, params: SamplingParams) -> None:
    """All drafts of three sequences in one batch, greedy or with shared noise, bit for bit what the target samples."""
    borrowed = Borrowed(tiny)
    proposer = ModelProposer(borrowed, max_drafts=4, prefill_tokens=512)  # type: ignore[arg-type]
    sampling = DraftSampling(params.seed, 0, params.temperature, params.top_k, params.top_p, params.min_p)
    size, used = tiny.spec.block_size, 0
    pairs = []
    for number, prompt in enumerate(PROMPTS):
        target = Sequence(100 + number, 0, params, list(prompt), len(prompt))
        blocks = -(-(len(prompt) + 40) // size)
        pairs.append(
            (target, list(range(used, used + blocks)), DraftSequence(number, [], len(prompt), sampling=sampling))
        )
        used += blocks
    tiny.execute([Slice(target, table, 0, len(target.token_ids) - 1, sample=False) for target, table, _ in pairs])
    proposed = accepted = 0
    for _, _, draft in pairs:
        proposer.start(draft)
    for _ in range(5):
        for target, _, draft in pairs:
            start = len(draft.tokens)
            draft.tokens.extend(target.token_ids[start:])
            proposer.extend(draft, start)
        guesses = proposer.propose([(draft, 4) for _, _, draft in pairs])
        slices = [
            Slice(target, table, len(target.token_ids) - 1, 1, guess.ids)
            for (target, table, _), guess in zip(pairs, guesses, strict=True)
        ]
        for (target, _, _), guess, output in zip(pairs, guesses, tiny.execute(slices), strict=True):
            proposed, accepted = proposed + len(guess.ids), accepted + output.accepted
            target.token_ids += output.token_ids
    assert proposed >= 15 and accepted == proposed
    for _, _, draft in pairs:
        proposer.finish(draft, completed=True)
    assert proposer._pool.num_used == 0
