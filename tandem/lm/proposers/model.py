"""A small causal language model as proposer: its own paged KV, one batch for all sequences, prompts in chunks.

With temperature the draft draws with the target's noise (same seed, position, choice and purpose), so that it is right
more often than its probabilities alone would make it. For verification by rejection it must not share noise: then it
draws from its own sparse distribution with noise of another purpose, and hands the distribution over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from tandem.block_hash import ROOT, hash_block, hash_chain
from tandem.lm.block_pool import BlockPool, OutOfBlocksError, pack_tokens
from tandem.lm.proposers.base import NOTHING, Distribution, DraftSequence, Guess
from tandem.lm.proposers.drawing import TOP, draw
from tandem.lm.types import Runner, SamplingParams, Sequence, Slice, SliceOutput

# A chain of drafts less likely than this to be right as a whole is not made longer.
_MIN_CHAIN = 0.2


@dataclass(slots=True, eq=False)
class _State:
    """A sequence in the draft's own KV. `written` are the tokens whose KV is in the blocks."""

    source: DraftSequence
    sequence: Sequence
    salt: bytes
    blocks: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    # Chain hashes of the blocks that were registered or reused.
    hashes: list[bytes] = field(default_factory=list)
    looked_up: bool = False
    # Tokens at the beginning of `written` that are known to be committed.
    agreed: int = 0
    # Call in which it was last asked for.
    used: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """What one sequence drafts in one call."""

    state: _State
    want: int
    committed: int
    ids: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    chain: float = 1.0

    @property
    def goes_on(self) -> bool:
        return len(self.ids) < self.want and self.chain >= _MIN_CHAIN


class ModelProposer:
    """Drives a Runner. Prompts are caught up with at most `prefill_tokens` per call, so that no answer takes long."""

    name = "model"

    def __init__(self, runner: Runner, max_drafts: int = 5, prefill_tokens: int = 512) -> None:
        """max_drafts: most tokens per guess; each costs one pass of the model."""
        self._runner = runner
        self._max_drafts = max_drafts
        self._prefill_tokens = prefill_tokens
        spec = runner.spec
        self._pool = BlockPool(spec.num_blocks, spec.block_size)
        self._states: dict[DraftSequence, _State] = {}
        self._clock = 0

    @property
    def vocab_size(self) -> int:
        return self._runner.spec.vocab_size

    def start(self, sequence: DraftSequence) -> None:
        own = Sequence(sequence.id, sequence.sampling.choice, SamplingParams(temperature=0.0), [], sequence.prompt_len)
        self._states[sequence] = _State(sequence, own, sequence.salt.encode())

    def extend(self, sequence: DraftSequence, start: int) -> None:
        """Raises ValueError on an id that the model does not know."""
        new = sequence.tokens[start:]
        if new and max(new) >= self.vocab_size:
            raise ValueError(f"token {max(new)} is not in the draft model's vocabulary of {self.vocab_size}")
        self._states[sequence].sequence.token_ids.extend(new)

    def finish(self, sequence: DraftSequence, completed: bool) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            self._pool.release(state.blocks)
            self._runner.forget(sequence.id)

    def close(self) -> None:
        self._states.clear()
        self._runner.close()

    def propose(self, wants: list[tuple[DraftSequence, int]]) -> list[Guess]:
        self._clock += 1
        runs: list[_Run] = []
        budget = self._prefill_tokens
        ready: list[_Run] = []
        for sequence, count in wants:
            state = self._states[sequence]
            state.used = self._clock
            room = self._runner.spec.max_model_len - len(sequence.tokens)
            run = _Run(state, min(count, self._max_drafts, room), len(sequence.tokens))
            runs.append(run)
            if run.want < 1:
                continue
            self._prepare(state)
            budget = self._catch_up(state, budget)
            if len(state.written) == run.committed - 1:
                ready.append(run)
        try:
            self._draft(ready)
        finally:
            # Also after an error no draft may stay among the committed tokens.
            for run in ready:
                del run.state.sequence.token_ids[run.committed :]
                self._register(run.state)
            self._pool.take_changes()
        return [_guess(run) for run in runs]

    def _prepare(self, state: _State) -> None:
        """Fixes how to sample, looks for a cached prefix once, and drops KV of drafts that did not come true."""
        sampling, tokens = state.source.sampling, state.sequence.token_ids
        if sampling.want_distribution or sampling.temperature == 0:
            state.sequence.params = SamplingParams(
                temperature=0.0, logit_bias=sampling.logit_bias, logprobs=TOP if sampling.want_distribution else 0
            )
        else:
            state.sequence.params = SamplingParams(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=sampling.seed,
                logit_bias=sampling.logit_bias,
                logprobs=0,
            )
        if not state.looked_up:
            self._reuse(state)
        # The last committed token is always computed anew: its logits start the drafts.
        agreed, most = state.agreed, min(len(state.written), len(tokens) - 1)
        while agreed < most and state.written[agreed] == tokens[agreed]:
            agreed += 1
        state.agreed = min(agreed, most)
        del state.written[state.agreed :]

    def _reuse(self, state: _State) -> None:
        state.looked_up = True
        size, tokens = self._pool.block_size, state.sequence.token_ids
        hashes = hash_chain(tokens[:-1], size, state.salt)
        found = self._pool.match(hashes, pack_tokens(tokens), state.salt)
        self._pool.take(found)
        state.blocks = found
        state.hashes = hashes[: len(found)]
        state.written = tokens[: len(found) * size]
        state.agreed = len(state.written)

    def _catch_up(self, state: _State, budget: int) -> int:
        """Computes committed tokens up to the last but one. Returns what is left of the budget."""
        last = len(state.sequence.token_ids) - 1
        while budget > 0 and len(state.written) < last:
            start = len(state.written)
            count = min(last - start, budget)
            if not self._cover(state, start + count):
                return budget
            self._runner.execute([Slice(state.sequence, state.blocks, start, count, sample=False)])
            state.written.extend(state.sequence.token_ids[start : start + count])
            budget -= count
        return budget

    def _draft(self, runs: list[_Run]) -> None:
        """Token by token, all sequences in one batch; a sequence leaves it when it has enough."""
        while runs:
            runs = [run for run in runs if self._cover(run.state, len(run.state.sequence.token_ids))]
            slices = [
                Slice(run.state.sequence, run.state.blocks, len(run.state.written), 1, sample=True) for run in runs
            ]
            outputs = self._runner.execute(slices) if slices else []
            for run, output in zip(runs, outputs, strict=True):
                run.state.written.append(run.state.sequence.token_ids[-1])
                self._take(run, output)
            runs = [run for run in runs if run.goes_on]

    def _take(self, run: _Run, output: SliceOutput) -> None:
        """Adds the next draft of a run, or ends the run."""
        if output.error is not None or not output.token_ids or not output.scores:
            run.want = 0
            return
        token, score = output.token_ids[0], output.scores[0]
        chance = math.exp(min(0.0, score.logprob))
        sampling = run.state.sequence.params
        if sampling.logprobs == TOP:
            ids, logprobs = np.asarray(score.top_ids, np.int64), np.asarray(score.top_logprobs, np.float64)
            token, chance, distribution = self._draw(run, ids, logprobs)
            run.distributions.append(distribution)
        run.ids.append(token)
        run.chances.append(chance)
        run.chain *= chance
        run.state.sequence.token_ids.append(token)

    def _draw(self, run: _Run, ids: np.ndarray, logprobs: np.ndarray) -> tuple[int, float, Distribution]:
        """A draft drawn from the truncated, renormalised distribution over the likeliest ids; its chance; that one."""
        sampling = run.state.source.sampling
        return draw(
            ids,
            logprobs,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            choice=sampling.choice,
            position=len(run.state.sequence.token_ids) - run.state.sequence.prompt_len,
        )

    def _cover(self, state: _State, tokens: int) -> bool:
        """Makes the blocks hold `tokens` tokens, at the cost of sequences that are not asked for now."""
        missing = -(-tokens // self._pool.block_size) - len(state.blocks)
        if missing <= 0:
            return True
        while True:
            try:
                state.blocks += self._pool.allocate(missing)
                return True
            except OutOfBlocksError:
                idle = [other for other in self._states.values() if other.blocks and other.used < self._clock]
                if not idle:
                    return False
                oldest = min(idle, key=lambda other: other.used)
                self._pool.release(oldest.blocks)
                oldest.blocks, oldest.written, oldest.hashes = [], [], []
                oldest.looked_up, oldest.agreed = False, 0

    def _register(self, state: _State) -> None:
        """Makes full blocks of committed tokens findable for other sequences."""
        size, tokens = self._pool.block_size, state.sequence.token_ids
        full = min(len(state.written), len(tokens)) // size
        for index in range(len(state.hashes), full):
            parent = state.hashes[-1] if state.hashes else ROOT
            part = tokens[index * size : (index + 1) * size]
            digest = hash_block(parent, state.salt, part)
            self._pool.register(state.blocks[index], digest, parent, state.salt, part)
            state.hashes.append(digest)


def _guess(run: _Run) -> Guess:
    if not run.ids:
        return NOTHING
    if run.distributions:
        # Whether a draft is verified may not depend on which one was drawn, or the output would lean: no confidence.
        return Guess(tuple(run.ids), ModelProposer.name, 0.0, 0, tuple(run.distributions))
    return Guess(tuple(run.ids), ModelProposer.name, run.chances[0])
