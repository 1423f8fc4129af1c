"""Processes die, and what a client sees of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import pytest

from tests.e2e.stack import Stack, alive, eventually

# Asks for text that a draft can guess, so that drafts are in use while the stream runs.
REPEAT = "Repeat this ten times: the quick brown fox jumps over the lazy dog."


def body(question: str, tokens: int, **more: object) -> dict[str, object]:
    message = {"role": "user", "content": question}
    return {"model": "smollm2-135m-instruct", "messages": [message], "temperature": 0, "max_tokens": tokens, **more}


def ask(stack: Stack, question: str, tokens: int = 24) -> httpx.Response:
    with stack.client() as http:
        return http.post("/v1/chat/completions", json=body(question, tokens))


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(stack: Stack, question: str, tokens: int, after: int = 0, act: Callable[[], None] | None = None) -> str:
    """The text of a stream; `act` is called once `after` chunks with text have come."""
    text, chunks = "", 0
    with (
        stack.client() as http,
        http.stream("POST", "/v1/chat/completions", json=body(question, tokens, stream=True)) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            chunks += 1
            if act is not None and chunks == after:
                act()
    return text


def test_draft_killed_in_mid_stream_changes_nothing(stack: Stack) -> None:
    undisturbed = streamed(stack, REPEAT, 96)
    killed = stack.pids("draft")
    assert len(killed) == 2

    def kill() -> None:
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    assert streamed(stack, REPEAT, 96, after=5, act=kill) == undisturbed
    eventually(lambda: len(stack.pids("draft")) == 2 and not set(stack.pids("draft")) & set(killed), 30)
    assert streamed(stack, REPEAT, 96) == undisturbed


def test_engine_killed_next_request_is_served_and_it_comes_back(stack: Stack) -> None:
    before = text_of(ask(stack, "What is the capital of Italy?"))
    for name in ("engine-0", "engine-1"):
        old = stack.pid(name)
        os.kill(old, signal.SIGKILL)
        assert text_of(ask(stack, "What is the capital of Italy?")) == before
        eventually(lambda name=name, old=old: stack.pids("engine") and _other(stack, name, old), 60, f"{name} is back")
        eventually(lambda name=name: f"{name} is back" in stack.log(), 60)


def _other(stack: Stack, name: str, old: int) -> bool:
    try:
        return stack.pid(name) != old
    except AssertionError:
        return False


def test_engine_killed_in_mid_stream_the_stream_goes_on(stack: Stack) -> None:
    undisturbed = streamed(stack, REPEAT, 64)

    def kill() -> None:
        # The engine that has the request is the one that computes.
        os.kill(_busy(stack), signal.SIGKILL)

    assert streamed(stack, REPEAT, 64, after=5, act=kill) == undisturbed
    eventually(lambda: len(stack.pids("engine")) == 2, 60)


def _busy(stack: Stack) -> int:
    import psutil

    processes = [psutil.Process(pid) for pid in stack.pids("engine")]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(0.05)
    spent = [sum(process.cpu_times()[:2]) - old for process, old in zip(processes, before, strict=True)]
    return processes[spent.index(max(spent))].pid


def test_router_killed_comes_back(stack: Stack) -> None:
    before = text_of(ask(stack, "What is the capital of Spain?"))
    old = stack.pids("router")
    os.kill(old[0], signal.SIGKILL)
    eventually(lambda: (now := stack.pids("router")) and now != old, 30)
    with stack.client() as http:
        eventually(lambda: http.get("/ready").status_code == 200, 30)
    assert text_of(ask(stack, "What is the capital of Spain?")) == before


def test_speculation_changes_no_answer(stack: Stack, start_stack: Callable[..., Stack]) -> None:
    questions = [REPEAT, "Count from one to twenty.", "Write a poem about rain."]
    with_drafts = [text_of(ask(stack, question, 48)) for question in questions]
    plain = start_stack("--draft", "none", "--kv-cache-bytes", str(128 * 1024 * 1024))
    assert [text_of(ask(plain, question, 48)) for question in questions] == with_drafts
    assert "draft-0" not in plain.output
    _no_engine_is_503(plain)
    _ctrl_c_leaves_nothing(plain)


def _no_engine_is_503(stack: Stack) -> None:
    """While the only engine is down: 503 with Retry-After, and 404 for a name that never was."""
    os.kill(stack.pid("engine-0"), signal.SIGSTOP)
    os.kill(stack.pid("engine-0"), signal.SIGKILL)
    saw = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and 503 not in saw:
        answer = ask(stack, "Hello", 1)
        saw.append(answer.status_code)
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["message"]
    assert 503 in saw, saw
    eventually(lambda: ask(stack, "Hello", 1).status_code == 200, 60)


def _ctrl_c_leaves_nothing(stack: Stack) -> None:
    processes = stack.everything()
    assert len(processes) >= 4
    with (
        stack.client() as http,
        http.stream("POST", "/v1/chat/completions", json=body(REPEAT, 2000, stream=True, ignore_eos=True)) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        began = time.monotonic()
        stack.process.send_signal(signal.SIGINT)
        events = [line for line in lines if line.startswith("data: ")]
        stack.process.wait(10)
    # The client is told, not just cut off.
    assert "error" in json.loads([event for event in events if event != "data: [DONE]"][-1][6:])
    assert time.monotonic() - began < 10
    assert stack.process.returncode == 0, stack.log()
    assert alive(processes) == []
    assert not stack.run_dir.exists()


def test_kill_nine_of_the_launcher_leaves_nothing_and_two_run_side_by_side(
    stack: Stack, start_stack: Callable[..., Stack]
) -> None:
    second = start_stack("--kv-cache-bytes", str(64 * 1024 * 1024))
    assert text_of(ask(second, "Say hello.")) == text_of(ask(stack, "Say hello."))
    processes = second.everything()
    assert len(processes) >= 5
    second.process.kill()
    second.process.wait()
    eventually(lambda: alive(processes) == [], 10, "everything is gone")
    eventually(lambda: not second.run_dir.exists(), 5)
    assert ask(stack, "Say hello.").status_code == 200


def test_a_model_that_is_not_there_ends_the_start_with_its_error(start_stack: Callable[..., Stack]) -> None:
    broken = start_stack("--model", "./no-such-model.gguf", wait=False)
    assert broken.process.wait(60) != 0
    assert "no-such-model.gguf" in broken.log()


def test_a_setting_that_an_engine_refuses_ends_the_start(start_stack: Callable[..., Stack]) -> None:
    broken = start_stack("--block-size", "13", wait=False)
    assert broken.process.wait(60) != 0
    assert "13" in broken.log()


def test_a_taken_port_is_one_line(stack: Stack) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tandem.cli", "serve", "--port", str(stack.port)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"127.0.0.1:{stack.port} taken" in done.stderr


def test_drain_is_told_and_taken_back(stack: Stack) -> None:
    def drain(*more: str) -> str:
        command = [sys.executable, "-m", "tandem.cli", "drain", stack.address("engine-1"), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "draining" in drain()
    assert ask(stack, "Say hello.").status_code == 200
    assert "ready" in drain("--cancel")


@pytest.mark.slow
def test_an_engine_that_keeps_crashing_is_given_up_and_the_other_serves(stack: Stack) -> None:
    for _ in range(5):
        pid = eventually(lambda: _pid_or_none(stack, "engine-1"), 60)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: _pid_or_none(stack, "engine-1") != pid, 60)
    eventually(lambda: "given up" in stack.log(), 30)
    assert ask(stack, "Say hello.").status_code == 200


def _pid_or_none(stack: Stack, name: str) -> int | None:
    try:
        return stack.pid(name)
    except AssertionError:
        return None
