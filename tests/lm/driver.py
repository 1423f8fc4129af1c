"""A small stand-in for the engine's scheduler: drives a runner along a chosen path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.lm.types import Runner, SamplingParams, Sequence, Slice, TokenScore

# Proposes drafts from the tokens so far.
Proposer = Callable[[list[int]], tuple[int, ...]]


@dataclass
class Job:
    """One sequence and what came out."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    choice: int = 0
    output: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    accepted: int = 0
    error: str | None = None


class Driver:
    """Runs jobs together; blocks are handed out in an order that `stride` scatters."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._next_id = 0
        self._next_block = 0

    def blocks(self, tokens: int) -> list[int]:
        """Fresh blocks for so many tokens, not in ascending order."""
        spec = self.runner.spec
        need = -(-tokens // spec.block_size)
        found = [(self._next_block + i) % spec.num_blocks for i in range(need)]
        self._next_block += need
        return found[::-1]

    def run(
        self,
        jobs: list[Job],
        chunk: int = 10_000,
        propose: Proposer | None = None,
        tables: list[list[int]] | None = None,
        computed: list[int] | None = None,
    ) -> list[list[int]]:
        """Generates max_tokens for each job. `computed` tokens of a job lie in its table already. Returns tables."""
        sequences = []
        for job in jobs:
            self._next_id += 1
            sequences.append(Sequence(self._next_id, job.choice, job.params, list(job.prompt), len(job.prompt)))
        done = list(computed or [0] * len(jobs))
        tables = tables or [self.blocks(len(job.prompt) + job.max_tokens + 8) for job in jobs]
        while live := [i for i, job in enumerate(jobs) if len(job.output) < job.max_tokens and not job.error]:
            slices = []
            for i in live:
                tokens = sequences[i].token_ids
                count = min(chunk, len(tokens) - done[i])
                last = done[i] + count == len(tokens)
                left = jobs[i].max_tokens - len(jobs[i].output)
                drafts = propose(tokens)[: left - 1] if propose and last else ()
                slices.append(Slice(sequences[i], tables[i], done[i], count, drafts, sample=last))
            for i, item, output in zip(live, slices, self.runner.execute(slices), strict=True):
                done[i] += item.count + output.accepted
                jobs[i].output += output.token_ids
                jobs[i].scores += output.scores or []
                jobs[i].accepted += output.accepted
                jobs[i].error = output.error
                sequences[i].token_ids += output.token_ids
        for sequence in sequences:
            self.runner.forget(sequence.id)
        return tables
