"""The head as a proposer inside the engine: drafts for several sequences at once, right after their tokens are sampled.

It is no `Proposer` of the draft service, because its input is what only the engine has: the hidden state whose logits
gave the last token, and the target's embeddings. It keeps nothing between two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tandem.lm.processors import Row, needs_processing
from tandem.lm.proposers.drawing import TOP, draw
from tandem.lm.proposers.head_chains import compiled_chains
from tandem.lm.proposers.head_file import HeadError, HeadFile
from tandem.lm.proposers.head_net import HeadNet, head_net
from tandem.lm.sampler import Sampler
from tandem.lm.types import Runner, SamplingParams, Sequence

SparseDistribution = tuple[np.ndarray, np.ndarray]

# Claims are told apart in so many steps; the compiled chains know this number too.
CLAIMS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Pursuit:
    """When a chain of drafts is worth another one: while the chance that all of it is right exceeds a price."""

    # fp32 [2, CLAIMS, 2]: chance of a draft given those before = [0] + [1] · claim, by step of the claim; of the first
    # draft and of later ones.
    trust: np.ndarray
    # fp32 [at least the run's most]: the chance that must be exceeded after draft i.
    least: np.ndarray

    def goes_on(self, claims: list[float]) -> bool:
        """Whether a chain with these claims (at least one) gets another draft."""
        reach = 1.0
        for at, claim in enumerate(claims):
            first, slope = self.trust[min(at, 1), min(int(claim * CLAIMS), CLAIMS - 1)]
            reach *= float(first + slope * claim)
        return reach > self.least[len(claims) - 1]


@dataclass(slots=True, eq=False)
class HeadRun:
    """What the head drafts for one sequence in one call; ids, claims and distributions are filled by it."""

    # The committed tokens and how to sample what follows; only read.
    sequence: Sequence
    # fp32 [hidden]: the target's final state whose logits gave the last token.
    hidden: np.ndarray
    most: int
    # Draw for verification by rejection: noise of its own, and a distribution per draft.
    rejection: bool = False
    # When the chain ends before `most`; None: never.
    pursuit: Pursuit | None = None
    ids: list[int] = field(default_factory=list)
    # Probability that the head gives each id, at temperature 1 (rejection: in its distribution).
    claims: list[float] = field(default_factory=list)
    distributions: list[SparseDistribution] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether it gets another draft."""
        if len(self.ids) >= self.most:
            return False
        return self.pursuit is None or not self.ids or self.pursuit.goes_on(self.claims)


class HeadProposer:
    """Drafts with a HeadFile. One thread calls it."""

    name = "head"

    def __init__(self, head: HeadFile, runner: Runner, net: HeadNet | None = None) -> None:
        """net: the head's arithmetic, token by token; None: the fastest here, whole chains where that is possible.

        Raises:
            HeadError: the head was made for another model, or the model gives no hidden states.
        """
        spec = runner.spec
        if head.target_digest != spec.model_digest:
            raise HeadError(f"trained for the model of digest {head.target_digest}, but {spec.model_digest} is loaded")
        if (head.hidden, head.target_vocab) != (spec.hidden_size, spec.vocab_size):
            raise HeadError(
                f"made for hidden size {head.hidden} and {head.target_vocab} tokens, but the model has "
                f"{spec.hidden_size} and {spec.vocab_size}"
            )
        if not spec.gives_hidden:
            raise HeadError(f"the model runs on {spec.kernel_path}, which gives no hidden states")
        self._runner, self._net = runner, net or head_net(head)
        self._chains = compiled_chains(self._net, runner) if net is None else None
        self._ids = head.ids.astype(np.int64)
        self._vocab = spec.vocab_size
        self._sampler, self._score = _sampling(spec.vocab_size)
        # Logits over the whole vocabulary; ids that the head does not know stay impossible.
        self._full = np.full((1, spec.vocab_size), -np.inf, np.float32)
        # The first call sets buffers up, which would be measured as the head's cost.
        nothing = np.zeros(head.hidden, np.float32)
        self._net.step(self._net.start(nothing[None]), nothing[None])
        if self._chains is not None:
            self._chains.draft([HeadRun(Sequence(0, 0, SamplingParams(), [0], 1), nothing, 1)])

    def draft(self, runs: list[HeadRun]) -> None:
        """Fills the runs, all in one batch; a run leaves it when it has enough."""
        live = [run for run in runs if run.most > 0]
        if self._chains is not None:
            whole = [run for run in live if not run.rejection and not needs_processing(_Shadow(run).row)]
            if whole:
                self._chains.draft(whole)
            live = [run for run in live if run not in whole]
        if live:
            self._stepwise(live)

    def _stepwise(self, live: list[HeadRun]) -> None:
        """Token by token, each sampled as the engine would."""
        shadows = [_Shadow(run) for run in live]
        states = self._net.start(np.stack([run.hidden for run in live]))
        while shadows:
            logits = self._net.step(states, self._runner.embedding_rows([shadow.last for shadow in shadows]))
            self._take(shadows, logits)
            stay = [row for row, shadow in enumerate(shadows) if shadow.run.goes_on]
            if len(stay) < len(shadows):
                shadows, states = [shadows[row] for row in stay], np.ascontiguousarray(states[stay])

    def _take(self, shadows: list[_Shadow], logits: np.ndarray) -> None:
        """Samples one draft per row of logits fp32 [rows, vocab of the head]."""
        if not any(shadow.special for shadow in shadows):
            places = logits.argmax(axis=1)
            for shadow, token in zip(shadows, self._ids[places].tolist(), strict=True):
                shadow.run.ids.append(token)
        else:
            places = self._sample(shadows, logits)
        for shadow, claim in zip(shadows, self._score(logits, places), strict=True):
            if not shadow.run.rejection:
                shadow.run.claims.append(claim)

    def _sample(self, shadows: list[_Shadow], logits: np.ndarray) -> np.ndarray:
        """Samples as the engine's sampler would, penalties aside. Returns where the drafts are in the head's ids."""
        rows = [shadow.row for shadow in shadows]
        if len(self._full) < len(rows):
            self._full = np.full((len(rows), self._vocab), -np.inf, np.float32)
        full = self._full[: len(rows)]
        for target, source in zip(full, logits, strict=True):
            target[self._ids] = source
        found = self._sampler.sample(full, rows).ids.tolist()
        for row, (shadow, token) in enumerate(zip(shadows, found, strict=True)):
            if shadow.run.rejection:
                token = self._draw(shadow, self._sampler.process(full[row : row + 1], rows[row : row + 1])[0])
            shadow.run.ids.append(token)
        return np.searchsorted(self._ids, [shadow.run.ids[-1] for shadow in shadows])

    def _draw(self, shadow: _Shadow, logits: np.ndarray) -> int:
        """A draft for rejection from processed logits fp32 [vocab]; notes its distribution."""
        run, params, sequence = shadow.run, shadow.sequence.params, shadow.sequence
        head = np.argpartition(-logits, TOP)[:TOP] if len(logits) > TOP else np.arange(len(logits))
        head = np.sort(head[np.isfinite(logits[head])])
        if not len(head):
            # Every id that the head knows is banned; any draft is as good, and verification refuses it.
            head, logits = self._ids[:1], np.zeros(self._vocab, np.float32)
        token, claim, (ids, chances) = draw(
            head,
            logits[head].astype(np.float64),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed,
            choice=sequence.choice,
            position=sequence.output_len + len(run.ids),
        )
        run.claims.append(claim)
        run.distributions.append((np.asarray(ids, np.int64), np.asarray(chances, np.float32)))
        return token


class _Shadow:
    """A run with its sequence as the drafts see it: sampled without penalties, which need counts per token."""

    __slots__ = ("run", "sequence", "special")

    def __init__(self, run: HeadRun) -> None:
        of = run.sequence
        params = of.params
        if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
            params = replace(params, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
        self.run = run
        self.sequence = Sequence(of.id, of.choice, params, of.token_ids, of.prompt_len)
        # Anything but the plain argmax.
        self.special = not params.greedy or run.rejection or needs_processing(self.row)

    @property
    def row(self) -> Row:
        """The row that the next draft is sampled from."""
        return Row(self.sequence, tuple(self.run.ids))

    @property
    def last(self) -> int:
        """The token that the next draft follows."""
        return self.run.ids[-1] if self.run.ids else self.sequence.token_ids[-1]


# Probabilities at temperature 1 of one place per row, from logits fp32 [rows, n].
Score = Callable[[np.ndarray, np.ndarray], list[float]]


def _sampling(vocab_size: int) -> tuple[Sampler, Score]:
    """Sampler and scores: the compiled ones where they exist."""
    try:
        from kernels import cpu

        if cpu.available():
            from tandem.lm.models.compiled_sampler import CompiledSampler

            return CompiledSampler(vocab_size), _compiled_score
    except ImportError:
        pass
    return Sampler(vocab_size), _plain_score


def _compiled_score(logits: np.ndarray, places: np.ndarray) -> list[float]:
    from kernels.cpu import sampling

    count = len(logits)
    known = np.minimum(places, logits.shape[1] - 1).astype(np.int32)
    scores = sampling.score(logits, np.arange(count, dtype=np.int32), known, np.zeros(count, np.int32))
    return np.exp(scores.logprobs).tolist()


def _plain_score(logits: np.ndarray, places: np.ndarray) -> list[float]:
    rows, known = np.arange(len(logits)), np.minimum(places, logits.shape[1] - 1)
    wide = logits.astype(np.float64)
    return (1.0 / np.exp(wide - wide[rows, known][:, None]).sum(axis=1)).tolist()
