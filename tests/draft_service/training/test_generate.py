"""The target's own conversations: whole, seeded, without duplicates, and resumable."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from draft_service.training.generate import Generator, Plan, Template, append, read
from tandem.lm.types import SamplingParams
from tests.engine_service.fakes import EOS, FakeRunner, hashed_next

TEMPLATE = Template((1, 2, 3), (4, 5), frozenset({EOS}))
PLAN = Plan(seed=3, max_user=12, max_answer=20, batch=3)


def ends_often(prefix: list[int], params: SamplingParams, choice: int) -> int:
    """A model whose turns end with a chance of one in nine."""
    token = hashed_next(10_007)(prefix, params, choice)
    return EOS if token % 9 == 0 else token % 200


def generator(**fields: object) -> Generator:
    return Generator(FakeRunner(next_token=ends_often), TEMPLATE, PLAN, **fields)  # type: ignore[arg-type]


def take(count: int, **fields: object) -> list[tuple[int, list[int], int]]:
    return list(itertools.islice(generator(**fields).run(0), count))


def test_conversations_are_what_the_model_would_write_alone() -> None:
    """The fake model also refuses every wrong read of KV, so slots are rightly reused."""
    talks = take(25)
    for index, ids, answer in talks:
        assert tuple(ids[:3]) == TEMPLATE.before_user
        assert tuple(ids[answer - 2 : answer]) == TEMPLATE.before_answer
        assert 3 <= answer - 2 - 3 <= PLAN.max_user
        assert ids[-1] == EOS or len(ids) - answer == PLAN.max_answer
        params = SamplingParams(temperature=0.8 if index % 2 else 0.0, seed=(3 << 32) + index)
        for place in range(answer, len(ids)):
            assert ids[place] == ends_often(ids[:place], params, 0)


def test_equal_seeds_write_equal_conversations() -> None:
    assert take(10) == take(10)


def test_user_turns_never_repeat() -> None:
    seen: set[bytes] = set()
    first = take(10, seen=seen)
    under_test = generator(seen=seen)
    again = list(itertools.islice(under_test.run(0), 5))
    turns = [tuple(ids[3 : answer - 2]) for _, ids, answer in first + again]
    assert len(set(turns)) == len(turns)
    assert under_test.duplicates >= 10


def test_given_prompts_come_first() -> None:
    talks = take(3, prompts=iter([[50, 51, 52], [60, 61, 62, 63]]))
    assert {tuple(ids[3 : answer - 2]) for _, ids, answer in talks} >= {(50, 51, 52), (60, 61, 62, 63)}


def test_file_survives_a_cut_off_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    append(path, [(0, [1, 2, 3], 2)])
    with path.open("a") as file:
        file.write('{"index": 1, "ids": [1, 2')
    append(path, [(2, [4, 5], 1)])
    assert read(path) == [(0, [1, 2, 3], 2), (2, [4, 5], 1)]


def test_too_small_a_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="needs"):
        next(Generator(FakeRunner(num_blocks=2), TEMPLATE, PLAN).run(0))


def test_a_looping_answer_is_cut() -> None:
    runner = FakeRunner(next_token=lambda prefix, params, choice: 10 + len(prefix) % 4)
    plan = Plan(seed=3, max_user=12, max_answer=200, batch=1, loop=8)
    prompts = iter([[50, 51, 52]])
    _, ids, answer = next(Generator(runner, TEMPLATE, plan, prompts).run(0))
    # Every eight tokens in a row stand there for the third time after two more rounds of four.
    assert len(ids) - answer == 8 + 4 + 4
