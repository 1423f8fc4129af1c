"""From a served model's logged traffic to a draft: taken once, without repeats, held out by request."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from draft_service.training import logged, states
from draft_service.training.forced import ForcedError, read_states
from draft_service.training.gather import read_logged
from draft_service.training.generate import read
from draft_service.training.head import read_target
from draft_service.training.logged import Answer, Draw
from draft_service.training.main import main
from draft_service.training.talks import divide
from engine_service.process import Process
from engine_service.settings import EngineSettings
from tandem import rpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.lm.proposers.head_file import load_head
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import Runner
from tandem.traffic import Entry, Header, TrafficError, TrafficLog
from tests.engine_service.fakes import BYTE_VOCAB, byte_bundle

HIDDEN = 32
WORDS = ["what ", "is ", "the ", "name ", "of ", "this ", "town ", "and ", "who "]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama over bytes, with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=BYTE_VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_bytes(byte_bundle().tokenizer_json)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def runner(model: Path) -> Runner:
    return load_runner(RunnerSettings(model, numerics="exact", kernels="torch", threads=1, kv_cache_bytes=8 << 20))


def question(number: int) -> pb.GenerateRequest:
    """Of every two requests one is greedy; the last ten repeat the first word by word."""
    words = random.Random(number % 40).choices(WORDS, k=6)
    sampling = pb.SamplingParams(temperature=0.0 if number % 2 else 0.7, seed=2**63 + number % 40)
    stop = pb.StopConditions(max_tokens=24, ignore_eos=True)
    return pb.GenerateRequest(text="".join(words), sampling=sampling, stop=stop, n=2 if number % 7 == 0 else 1)


async def serve_and_log(model: Path, folder: Path, socket: Path) -> None:
    """50 requests to a real engine of this model."""
    settings = EngineSettings(
        listen=f"unix:{socket}", model=str(model), threads=1, kv_cache_bytes=16 << 20, traffic_log=str(folder)
    )
    process = Process(settings)
    await process.start()
    try:
        await process.load()
        async with rpc.channel(settings.listen) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)

            async def one(number: int) -> None:
                async for _ in stub.Generate(question(number)):
                    pass

            for start in range(0, 50, 10):
                await asyncio.gather(*(one(number) for number in range(start, start + 10)))
    finally:
        await process.stop()


@pytest.fixture(scope="module")
def traffic(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t")
    asyncio.run(serve_and_log(model, folder / "log", folder / "s"))
    return folder / "log"


def arguments(kind: str, model: Path, traffic: Path, out: Path, *more: str) -> list[str]:
    return [
        *("--kind", kind, "--target", str(model), "--out", str(out), "--traffic", str(traffic), "--tokens", "0"),
        *("--threads", "1", "--intermediate", "32", "--vocab", "128", "--epochs", "2", "--rows", "64", *more),
    ]


def test_a_head_from_what_an_engine_logged(model: Path, traffic: Path, runner: Runner, tmp_path: Path) -> None:
    out, copied = tmp_path / "out", tmp_path / "log"
    shutil.copytree(traffic, copied)
    assert main(arguments("head", model, copied, out)) == 0
    card = json.loads((out / "head.card.json").read_text())
    # 40 distinct requests, and second choices of the sampled ones 0, 14, 28 and 42; greedy choices are equal.
    assert card["logged_answers"] + card["held_out_logged_answers"] == 40 + 4
    assert card["conversations"] == card["logged_answers"] > 30
    assert card["held_out_logged_tokens"] >= 24 and card["seeds"] == []
    assert card["held_out"] == card["held_out_logged"]
    reports = card["held_out_logged"].values()
    assert reports and all(report["acceptance_length"] >= 1 for report in reports)
    assert load_head(out / "draft.head.safetensors").target_digest == runner.spec.model_digest
    for path in out.rglob("*"):
        assert path.is_dir() or path.stat().st_mode & 0o077 == 0, path
    # Again: nothing is left to do, whatever has been logged since.
    first = load_head(out / "draft.head.safetensors")
    log(model, copied, [entry("something new", "and its answer")])
    assert main(arguments("head", model, copied, out)) == 0
    again = load_head(out / "draft.head.safetensors")
    for name in ("w_in", "w_gate", "w_up", "w_down"):
        assert np.array_equal(getattr(again, name).dequantize(), getattr(first, name).dequantize())
    for name in ("logged_answers", "steps", "held_out_logged"):
        assert again.card[name] == first.card[name]


def test_a_head_from_both(model: Path, traffic: Path, tmp_path: Path) -> None:
    """The target's own conversations and logged ones, each held out by its own rule."""
    more = ("--tokens", "2500", "--max-answer", "24", "--batch", "8", "--max-user", "24")
    assert main(arguments("head", model, traffic, tmp_path / "out", *more)) == 0
    card = json.loads((tmp_path / "out" / "head.card.json").read_text())
    assert card["seeds"] == [0]
    assert card["answer_tokens"] > 2000 + card["logged_tokens"]
    assert card["held_out_conversations"] > card["held_out_logged_answers"] > 0
    total = sum(report["positions"] for report in card["held_out"].values())
    assert total > sum(report["positions"] for report in card["held_out_logged"].values()) > 0


def test_a_table_from_what_an_engine_logged(model: Path, traffic: Path, tmp_path: Path) -> None:
    """As a user would."""
    command = [sys.executable, "-m", "tandem.cli", "draft", "train"]
    command += arguments("table", model, traffic, tmp_path / "out")
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    card = json.loads((tmp_path / "out" / "table.card.json").read_text())
    assert json.loads(done.stdout[done.stdout.index("{") :]) == card
    assert card["held_out_logged"] == card["held_out_all"]
    assert card["held_out_logged"]["acceptance_length"] >= 1


def test_states_are_those_that_served_the_answers(model: Path, traffic: Path, runner: Runner, tmp_path: Path) -> None:
    """Read in pieces, the states' likeliest tokens are what was answered greedily; and again after a stop."""
    options = argparse.Namespace(target=str(model), traffic=[traffic], traffic_tokens=10**6)
    logged.take(options, tmp_path)
    talks = read(tmp_path / "data.jsonl")
    read_logged(runner, tmp_path / "states.f16", talks)
    whole = (tmp_path / "states.f16").read_bytes()
    found = states.load(tmp_path / "states.f16", talks, HIDDEN)
    rows = read_target(str(model)).head.numpy()
    greedy = found.talk % 2 == 0
    likeliest = (found.hidden[greedy].astype(np.float32) @ rows.T).argmax(axis=1)
    assert greedy.sum() > 300 and (likeliest == found.tokens[greedy]).mean() > 0.98
    (tmp_path / "states.f16").write_bytes(whole[: len(whole) // 2 + 1])
    read_logged(runner, tmp_path / "states.f16", talks)
    assert (tmp_path / "states.f16").read_bytes() == whole


@pytest.mark.parametrize(("prompt", "output"), [(1, 2), (1, 70), (300, 3), (513, 40)])
def test_states_do_not_depend_on_the_pieces(runner: Runner, prompt: int, output: int) -> None:
    rng = np.random.default_rng(prompt)
    prompt = min(prompt, 512 - output)
    ids = rng.integers(0, 256, prompt + output).tolist()
    found: list[np.ndarray] = []
    read_states(runner, [(3, ids, prompt), (4, [5, 6, 7, 8, 9], 2)], found.append)
    assert [len(rows) for rows in found] == [output, 3]
    for place in {0, output // 2, output - 1}:
        expected = runner.embed([ids[: prompt + place]], "last", normalize=False)[0]
        assert np.allclose(found[0][place], expected, atol=2e-3), place


def test_a_request_that_the_target_cannot_hold_is_an_error(runner: Runner) -> None:
    with pytest.raises(ForcedError, match=r"600 tokens, but .* context 512"):
        read_states(runner, [(0, [1] * 600, 10)], lambda rows: None)


def entry(prompt: str, *outputs: str, temperature: float = 0.0, seed: int = 1) -> Entry:
    return Entry(list(prompt.encode()), [list(output.encode()) for output in outputs], temperature, seed)


def test_what_is_collected() -> None:
    entries = [entry("a", "xyz"), entry("b", "uv", "w", temperature=1.0, seed=9), entry("a", "xyz"), entry("ax", "yz")]
    found = logged.collect(entries, 100)
    assert [(bytes(a.ids), a.first) for a in found] == [(b"buv", 1), (b"axyz", 1), (b"axyz", 2)]
    assert found[0].draw == Draw(1.0, 9, 0)
    assert [bytes(a.ids) for a in logged.collect(entries, 3)] == [b"axyz", b"axyz"]
    assert [a.first for a in logged.collect(entries, 2)] == [2]
    assert logged.collect([entry("a" * 5_000, "xyz")], 100) == []


def test_held_out_by_request_and_conversation(tmp_path: Path) -> None:
    """Choices, repeats and later turns of a held-out request are held out with it."""
    answers = []
    for number in range(200):
        first = f"{number:03} hello"
        for prompt, output in (
            (first, "hi"),
            (first, "ho"),
            (f"{first} hi and then", "so"),
            (f"{first} ho well", "no"),
        ):
            ids = list(f"{prompt}{output}".encode())
            answers.append(Answer(ids, len(prompt), Draw(0.0, 1, 0)))
    random.Random(1).shuffle(answers)
    (tmp_path / "traffic").mkdir()
    from draft_service.training.gather import Place

    place = Place(tmp_path / "traffic")
    logged.write(place.talks, answers)
    talks = read(place.talks)
    chosen = logged.held_out(talks)
    sides: dict[bytes, set[bool]] = {}
    for index, ids, _ in talks:
        sides.setdefault(bytes(ids[:3]), set()).add(index in chosen)
    assert all(len(side) == 1 for side in sides.values())
    assert 4 <= len(chosen) / 4 <= 20
    divided = divide([place])
    assert len(divided.test()) == len(chosen) and len(divided.train()) == 800 - len(chosen)


def test_one_request_alone_cannot_be_divided(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(model, tmp_path / "log", [entry("hello", "one", "two", temperature=1.0)])
    assert main(arguments("table", model, tmp_path / "log", tmp_path / "out")) == 1
    assert "too few" in capsys.readouterr().out


def log(model: Path, folder: Path, entries: list[Entry]) -> None:
    under_test = TrafficLog(folder, logged.header_of(str(model)), 1 << 20)
    for one in entries:
        under_test.offer(one)
    under_test.close()


def test_logs_that_cannot_be_used_are_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        "none": "has no files",
        "other": "model_digest is 'abc'",
        "broken": "line 2: no JSON",
        "short": "no answer",
    }
    (tmp_path / "none").mkdir()
    other = TrafficLog(tmp_path / "other", Header("abc", "", BYTE_VOCAB), 1 << 20)
    other.offer(entry("a", "bcd"))
    other.close()
    log(model, tmp_path / "broken", [entry("a", "bcd")])
    (path,) = (tmp_path / "broken").iterdir()
    path.write_bytes(path.read_bytes().replace(b'{"prompt"', b"prompt"))
    log(model, tmp_path / "short", [entry("a", "b")])
    for name, reason in cases.items():
        assert main(arguments("table", model, tmp_path / name, tmp_path / f"out-{name}")) == 1
        said = capsys.readouterr().out
        assert reason in said and said.count("\n") == 1, said
    with pytest.raises(TrafficError):
        logged.take(argparse.Namespace(target=str(model), traffic=[tmp_path / "none"], traffic_tokens=1), tmp_path)


def test_other_traffic_needs_another_directory(
    model: Path, traffic: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(arguments("table", model, traffic, out)) == 0
    assert main(arguments("table", model, traffic, out, "--traffic-tokens", "100")) == 1
    assert "holds conversations written with" in capsys.readouterr().out
