"""A model as proposer, over a fake model whose every read of KV is verified."""

from __future__ import annotations

import random

import pytest

from tandem.lm.proposers import DraftSampling, DraftSequence
from tandem.lm.proposers.model import ModelProposer
from tandem.lm.types import SamplingParams, TokenScore
from tests.engine_service.fakes import FakeRunner

VOCAB = 258


class Sure(FakeRunner):
    """A model that is always sure."""

    def _score(self, prefix: list[int], token: int, top: int) -> TokenScore:
        ids = (token, *(i for i in range(top) if i != token))[:top]
        return TokenScore(token, -0.05, 1, ids, tuple(-0.05 - 2.0 * rank for rank in range(len(ids))))


def begin(proposer: ModelProposer, tokens: list[int], identity: int = 1, **fields: object) -> DraftSequence:
    sequence = DraftSequence(identity, [], prompt_len=len(tokens), **fields)  # type: ignore[arg-type]
    proposer.start(sequence)
    grow(proposer, sequence, tokens)
    return sequence


def grow(proposer: ModelProposer, sequence: DraftSequence, tokens: list[int]) -> None:
    start = len(sequence.tokens)
    sequence.tokens.extend(tokens)
    proposer.extend(sequence, start)


def expected(runner: FakeRunner, tokens: list[int], count: int, params: SamplingParams, choice: int = 0) -> list[int]:
    ids = list(tokens)
    for _ in range(count):
        ids.append(runner.next_token(ids, params, choice))
    return ids[len(tokens) :]


GREEDY = SamplingParams(temperature=0.0)


def test_drafts_are_what_the_model_says() -> None:
    runner = Sure()
    proposer = ModelProposer(runner, max_drafts=4)
    sequence = begin(proposer, [5, 6, 7])
    guess = proposer.propose([(sequence, 8)])[0]
    assert list(guess.ids) == expected(runner, [5, 6, 7], 4, GREEDY)
    assert guess.proposer == "model"
    assert guess.confidence == pytest.approx(0.951, abs=1e-3)


def test_kv_follows_accepted_and_rejected_drafts() -> None:
    """Any mix of right and wrong continuations: the fake refuses every read of KV that is not the sequence's own."""
    rng = random.Random(2)
    runner = Sure(num_blocks=200, max_model_len=400)
    proposer = ModelProposer(runner, max_drafts=5)
    sequences = [begin(proposer, [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))], i) for i in range(4)]
    for _ in range(40):
        asked = [(s, rng.randrange(1, 6)) for s in sequences if rng.random() < 0.7]
        guesses = proposer.propose(asked) if asked else []
        for (sequence, _), guess in zip(asked, guesses, strict=True):
            keep = rng.randrange(len(guess.ids) + 1)
            grow(proposer, sequence, [*guess.ids[:keep], rng.randrange(VOCAB)])
    for sequence in sequences:
        proposer.finish(sequence, completed=True)
    assert proposer._pool.num_used == 0
    proposer._pool.check()


def test_sampled_drafts_use_the_targets_seed_and_choice() -> None:
    runner = Sure()
    proposer = ModelProposer(runner, max_drafts=3)
    sampling = DraftSampling(seed=11, choice=2, temperature=0.9, top_k=7, top_p=0.8, min_p=0.01)
    sequence = begin(proposer, [1, 2, 3], sampling=sampling)
    params = SamplingParams(temperature=0.9, top_k=7, top_p=0.8, min_p=0.01, seed=11)
    assert list(proposer.propose([(sequence, 3)])[0].ids) == expected(runner, [1, 2, 3], 3, params, choice=2)
    assert runner.slices[0].sequence.prompt_len == 3


def test_long_prompts_are_caught_up_in_chunks_over_several_questions() -> None:
    runner = Sure(max_model_len=400)
    proposer = ModelProposer(runner, max_drafts=2, prefill_tokens=50)
    sequence = begin(proposer, [index % 200 for index in range(120)])
    answers = [proposer.propose([(sequence, 2)])[0].ids for _ in range(3)]
    assert answers[:2] == [(), ()]
    assert len(answers[2]) == 2
    assert runner.max_tokens_seen <= 50


def test_prefixes_are_reused_per_salt() -> None:
    runner = Sure()
    proposer = ModelProposer(runner, max_drafts=1)
    prompt = list(range(20))
    proposer.propose([(begin(proposer, prompt, 1, salt="a"), 1)])
    steps = runner.steps
    proposer.propose([(begin(proposer, prompt, 2, salt="a"), 1)])
    # Four blocks of four and three tokens more are known or cheap: one catch-up of three and one draft.
    assert runner.steps == steps + 2
    before = proposer._pool.num_cached
    proposer.propose([(begin(proposer, prompt, 3, salt="b"), 1)])
    assert proposer._pool.num_cached > before


def test_idle_sequences_give_up_their_memory() -> None:
    runner = Sure(num_blocks=12)
    proposer = ModelProposer(runner, max_drafts=2)
    first = begin(proposer, list(range(30)), 1)
    second = begin(proposer, list(range(100, 130)), 2)
    assert len(proposer.propose([(first, 2)])[0].ids) == 2
    assert len(proposer.propose([(second, 2)])[0].ids) == 2
    assert len(proposer.propose([(first, 2)])[0].ids) == 2
    # Both at once do not fit: one of them goes without, and nothing breaks.
    guesses = proposer.propose([(first, 2), (second, 2)])
    assert sorted(len(guess.ids) for guess in guesses) == [0, 2]


def test_unlikely_chains_are_cut() -> None:
    class Unsure(Sure):
        def _score(self, prefix: list[int], token: int, top: int) -> TokenScore:
            return TokenScore(token, -0.7, 1)

    proposer = ModelProposer(Unsure(), max_drafts=8)
    # 0.5^3 = 0.125 is under the limit of 0.2.
    assert len(proposer.propose([(begin(proposer, [1, 2]), 8)])[0].ids) == 3


def test_distributions_for_rejection_are_normalised_and_contain_the_draft() -> None:
    proposer = ModelProposer(Sure(), max_drafts=3)
    sampling = DraftSampling(seed=3, temperature=1.0, top_k=4, want_distribution=True)
    guess = proposer.propose([(begin(proposer, [1, 2, 3], sampling=sampling), 3)])[0]
    assert guess.distributions is not None and len(guess.distributions) == len(guess.ids)
    for token, (ids, chances) in zip(guess.ids, guess.distributions, strict=True):
        assert token in ids and len(ids) <= 4
        assert sum(chances) == pytest.approx(1.0)


def test_drafts_for_rejection_follow_their_distribution() -> None:
    counts: dict[int, int] = {}
    total, chances = 400, {}
    for seed in range(total):
        proposer = ModelProposer(Sure(), max_drafts=1)
        sampling = DraftSampling(seed=seed, temperature=2.0, top_k=3, want_distribution=True)
        guess = proposer.propose([(begin(proposer, [1, 2, 3], sampling=sampling), 1)])[0]
        assert guess.distributions is not None
        chances = dict(zip(*guess.distributions[0], strict=True))
        counts[guess.ids[0]] = counts.get(guess.ids[0], 0) + 1
    statistic = sum((counts.get(t, 0) - total * p) ** 2 / (total * p) for t, p in chances.items())
    assert statistic < 13.8  # chi-squared, two degrees of freedom, p = 0.001


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    proposer = ModelProposer(Sure())
    with pytest.raises(ValueError, match="vocabulary of 258"):
        begin(proposer, [300])
