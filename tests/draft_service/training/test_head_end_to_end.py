"""From a small random target to a head's file: conversations, hidden states, training, card; and after a stop."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from draft_service.training import head, states, table
from draft_service.training.gather import GatherError, Place, Writer, write
from draft_service.training.generate import Generator, Plan, Template, append, read
from draft_service.training.main import parser
from draft_service.training.states import StatesError
from draft_service.training.talks import divide
from tandem.lm.proposers.head_file import load_head
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import Runner

HIDDEN = 32
TEMPLATE = Template((1, 2, 3), (4, 5), frozenset({0}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def runner(model: Path) -> Runner:
    return load_runner(RunnerSettings(model, numerics="exact", kernels="torch", threads=1, kv_cache_bytes=8 << 20))


def fill(place: Place, runner: Runner, goal: int, first: int = 0) -> None:
    """Gathers up to `goal` answer tokens, as the command does behind its loading."""
    place.path.mkdir(exist_ok=True)
    place.claim({"seed": 4})
    known = read(place.talks)
    generator = Generator(runner, TEMPLATE, Plan(seed=4, max_user=6, max_answer=12, batch=4))
    have = sum(len(ids) - answer for _, ids, answer in known)
    write(generator, first, have, goal, float("inf"), Writer(place, HIDDEN, known))


def test_states_are_those_that_gave_the_tokens(model: Path, runner: Runner, tmp_path: Path) -> None:
    place = Place(tmp_path / "g")
    fill(place, runner, 100)
    talks = read(place.talks)
    found = states.load(place.states, talks, HIDDEN)
    rows = head.read_target(str(model)).head.numpy()
    greedy = found.talk % 2 == 0
    assert greedy.sum() > 20
    likeliest = (found.hidden[greedy].astype(np.float32) @ rows.T).argmax(axis=1)
    assert (likeliest == found.tokens[greedy]).mean() > 0.98
    assert found.left.tolist()[: len(talks[0][1]) - talks[0][2]] == list(range(len(talks[0][1]) - talks[0][2]))[::-1]


def test_a_stop_between_states_and_conversations_is_mended(runner: Runner, tmp_path: Path) -> None:
    place = Place(tmp_path / "g")
    fill(place, runner, 60)
    before = read(place.talks)
    with place.states.open("ab") as file:
        file.write(b"\0" * 2 * HIDDEN * 3)
    fill(place, runner, 120, first=1 + max(index for index, _, _ in before))
    talks = read(place.talks)
    assert talks[: len(before)] == before
    assert len(states.load(place.states, talks, HIDDEN)) == sum(len(ids) - answer for _, ids, answer in talks) >= 120


def test_conversations_without_states_are_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    append(place.talks, [(1, [1, 2, 3, 4], 2)])
    with pytest.raises(StatesError, match="need 128"):
        Writer(place, HIDDEN, read(place.talks))
    with pytest.raises(StatesError, match="2 answer tokens"):
        states.load(place.states, read(place.talks), HIDDEN)


def test_conversations_of_another_plan_are_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.claim({"seed": 1})
    place.claim({"seed": 1})
    with pytest.raises(GatherError, match=r"not .'seed': 2."):
        place.claim({"seed": 2})
    with pytest.raises(GatherError, match="does not tell the seed"):
        Place(tmp_path / "elsewhere").seed()


def test_no_held_out_prompt_was_learnt_from(tmp_path: Path) -> None:
    first, second = Place(tmp_path / "a"), Place(tmp_path / "b")
    for place, talks in (
        (first, [(0, [1, 1, 9], 2), (81, [1, 2, 9], 2), (21, [3, 3, 9], 2)]),
        (second, [(5, [1, 2, 8], 2), (163, [5, 5, 9], 2)]),
    ):
        place.path.mkdir()
        append(place.talks, talks)
    divided = divide([first, second])
    assert [ids[:2] for _, ids, _ in divided.train()] == [[3, 3], [1, 2]]
    assert [ids[:2] for _, ids, _ in divided.test()] == [[1, 1], [5, 5]]
    third = Place(tmp_path / "c")
    third.path.mkdir()
    append(third.talks, [(0, [1, 1, 9], 2)])
    with pytest.raises(GatherError, match="1 conversations are too few"):
        divide([third])


def test_head_and_table_of_one_gathering(model: Path, runner: Runner, tmp_path: Path) -> None:
    place = Place(tmp_path / "g")
    fill(place, runner, 900)
    arguments = ["--kind", "head", "--target", str(model), "--out", str(place.path), "--intermediate", "32"]
    options = parser().parse_args([*arguments, "--vocab", "64", "--epochs", "2", "--rows", "64"])
    card = head.fit(options, 0.0)
    path = place.path / "draft.head.safetensors"
    loaded, first = load_head(path), path.read_bytes()
    assert loaded.target_digest == runner.spec.model_digest
    assert json.loads(json.dumps(card)) == loaded.card
    assert card["seeds"] == [4]
    assert len(loaded.ids) == 64
    # Again from its checkpoint: nothing is left to do, and the file is the same but for nothing.
    head.fit(options, 0.0)
    assert path.read_bytes() == first
    assert {"greedy", "sampled"} == set(card["held_out"])  # type: ignore[call-overload]
    of_table = table.fit(options, 0.0)
    for name in ("conversations", "answer_tokens", "held_out_tokens"):
        assert of_table[name] == card[name]
    assert {"held_out_greedy", "held_out_sampled"} <= set(of_table)


def test_composed_prompts_are_used_once_each(runner: Runner) -> None:
    def composed(index: int) -> list[int] | None:
        return [50, 51, 52 + index % 2] if index % 4 < 2 else None

    generator = Generator(runner, TEMPLATE, Plan(seed=4, max_user=6, max_answer=4, batch=2), composed=composed)
    talks = list(itertools.islice(generator.run(0), 12))
    turns = [tuple(ids[3 : answer - 2]) for _, ids, answer in talks]
    assert {(50, 51, 52), (50, 51, 53)} <= set(turns)
    assert len(set(turns)) == len(turns)
