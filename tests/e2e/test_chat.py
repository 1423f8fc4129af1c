"""Chats through every service: real processes, the default model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = [
    "Name three fruits.",
    "What is the capital of France?",
    "Count from one to ten.",
    "Say: the cat sat on the mat, the cat sat on the mat, the cat sat on the mat.",
    "Write a haiku about the sea.",
    "What colour is the sky?",
    "List the days of the week.",
    "What is two plus two?",
]


def chat(client: openai.OpenAI, model: str, question: str, **options: object) -> str:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, **{"max_tokens": 24, **options}
    )
    return answer.choices[0].message.content or ""


@pytest.fixture(scope="module")
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_the_start_shows_what_runs_and_a_curl_that_works(stack: Stack) -> None:
    for name in ("gateway", "router", "engine-0", "engine-1", "draft-0", "draft-1", "numerics", stack.url):
        assert name in stack.output, stack.output
    command = next(line for line in stack.output.splitlines() if line.startswith("curl "))
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_streamed_chat_equals_the_plain_one(client: openai.OpenAI, model: str) -> None:
    plain = chat(client, model, QUESTIONS[0])
    assert plain
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert len([chunk for chunk in chunks if chunk.choices]) > 3


def test_sixteen_at_once_each_get_what_they_get_alone(stack: Stack, client: openai.OpenAI, model: str) -> None:
    questions = [f"{question} ({number})" for number in (1, 2) for question in QUESTIONS]
    alone = [chat(client, model, question) for question in questions]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as many:
            answers = await asyncio.gather(
                *(
                    many.chat.completions.create(
                        model=model, messages=[{"role": "user", "content": q}], temperature=0, max_tokens=24
                    )
                    for q in questions
                )
            )
        return [answer.choices[0].message.content or "" for answer in answers]

    assert asyncio.run(together()) == alone


def test_completions_and_models(client: openai.OpenAI, model: str) -> None:
    done = client.completions.create(model=model, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in done.choices[0].text
    assert client.models.retrieve(model).id == model


def test_health_ready_and_metrics(stack: Stack) -> None:
    with stack.client() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/ready").status_code == 200
        assert "# TYPE" in http.get("/metrics").text


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}', 404, ["no-such-model"]),
        (b'{"model": "MODEL", "messages": [', 400, []),
        (b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "temperature": 9}', 400, ["temperature"]),
        (b'{"model": "MODEL", "messages": "x"}', 400, ["messages"]),
        (b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}', 400, ["max_"]),
    ],
    ids=["unknown-model", "malformed-json", "bad-temperature", "bad-messages", "bad-max-tokens"],
)
def test_bad_requests_are_told_in_openai_form(
    stack: Stack, model: str, body: bytes, status: int, words: list[str]
) -> None:
    with stack.client() as http:
        headers = {"content-type": "application/json"}
        answer = http.post("/v1/chat/completions", content=body.replace(b"MODEL", model.encode()), headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"]


def test_too_long_a_prompt_names_both_numbers(stack: Stack, model: str) -> None:
    with stack.client() as http:
        limit = http.get("/v1/models").json()["data"][0]["max_model_len"]
        answer = http.post("/v1/completions", json={"model": model, "prompt": [5] * (limit + 7), "max_tokens": 1})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"].replace(",", "")
    assert str(limit) in message
    assert str(limit + 7) in message


def test_examples_run(stack: Stack) -> None:
    env = {"TANDEM_URL": stack.url}
    import os

    for command in (
        ["sh", "examples/chat.sh", "Name a colour."],
        [sys.executable, "examples/openai_chat.py", "Name a colour."],
        [sys.executable, "examples/grpc_client.py", stack.address("router"), "The capital of France is"],
        [sys.executable, "examples/grpc_client.py", stack.address("engine-0"), "The capital of France is"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}, timeout=110)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert done.stdout.strip()


def test_tandem_chat_asks_and_prints(stack: Stack) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cli", "chat", "--url", stack.url, "--temperature", "0", "What is two plus two?"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    down = subprocess.run(
        [sys.executable, "-m", "tandem.cli", "chat", "--url", "http://127.0.0.1:9", "x"], capture_output=True, text=True
    )
    assert down.returncode == 1
    assert "does not answer" in down.stderr


def test_reflection_lists_the_services(stack: Stack) -> None:
    import grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    expected = {
        "router": {"tandem.inference.v1.InferenceService"},
        "engine-0": {"tandem.inference.v1.InferenceService", "tandem.engine.v1.EngineService"},
        "draft-0": {"tandem.draft.v1.DraftService"},
    }
    for name, services in expected.items():
        with grpc.insecure_channel(stack.address(name)) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert services <= set(database.get_services()), name
            for service in services:
                assert database.FindFileContainingSymbol(service).package == service.rpartition(".")[0]


def test_hang_up_does_not_hurt_the_next(stack: Stack, model: str, client: openai.OpenAI) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Tell a very long story."}], "stream": True}
    with httpx.Client(base_url=stack.url) as http:
        for _ in range(3):
            with http.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 400}) as answer:
                next(answer.iter_lines())
    assert chat(client, model, QUESTIONS[1])
