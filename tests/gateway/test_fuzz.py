"""Malformed and hostile bodies: always a correct 4xx or an answer, never a 5xx, memory flat, chats going on beside."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Stand

PATHS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
]
FINE: dict[str, Any] = {
    "max_tokens": 2,
    "max_output_tokens": 2,
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "tokens": [1, 2],
}
FIELDS = [
    *FINE,
    "model",
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "stream",
    "tools",
    "tool_choice",
    "logit_bias",
    "response_format",
    "structured_outputs",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "stream_options",
    "system",
    "instructions",
    "chat_template_kwargs",
    "bad_words",
    "text",
    "metadata",
    "thinking",
    "guided_json",
    "documents",
]
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, -(2**63) - 1, 10**40, 1e308, -0.0, 0.1, "", " ", "\x00", "\ud83d\ude00",
    "x" * 3000, "\u202e", [], {}, [[]], [{}], [None], ["a", 1], {"a": None}, {"type": "function"},
    {"role": "user"}, [{"role": "user", "content": None}], [{"role": "user", "content": [{}]}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}], {"type": "json_schema"},
    {"json": {"$ref": "#/nowhere"}}, {"regex": "(" * 50}, {"grammar": "start:"}, {"1": 1e300}, {"-1": 1}, "auto",
    {"name": "f", "type": "tool"}, [1, 2, 3], [-1], [49151], [49152], ["<|im_start|>"],
]  # fmt: skip


def mutated(rng: random.Random) -> bytes:
    """A body that is wrong in one or more ways."""
    body = dict(FINE)
    for _ in range(rng.randint(1, 4)):
        field = rng.choice(FIELDS)
        action = rng.random()
        if action < 0.7:
            body[field] = rng.choice(NASTY)
        elif action < 0.85:
            body.pop(field, None)
        else:
            body[rng.choice(["x", "", "\x00", "a" * 500])] = rng.choice(NASTY)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    damage = rng.random()
    if damage < 0.1:
        raw = raw[: rng.randrange(len(raw) + 1)]
    elif damage < 0.2:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    elif damage < 0.25:
        raw = raw.replace(b"1", rng.choice([b"NaN", b"Infinity", b"1e999", b"01", b"9" * 500]))
    elif damage < 0.28:
        depth = rng.choice([50, 200, 5000])
        raw = b'{"messages":' + b"[" * depth + b"]" * depth + b"}"
    return raw


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def storm(stand: Stand, count: int, seed: int) -> None:
    rng = random.Random(seed)
    # A damaged limit is none, and to write to the end of the context would prove nothing here.
    stand.router.most_tokens = 4
    for number in range(count):
        path, raw = rng.choice(PATHS), mutated(rng)
        try:
            answer = stand.post(path, content=raw, headers={"content-type": "application/json"})
        except httpx.TransportError as error:
            raise AssertionError(f"case {number}: {path} {raw[:400]!r} → {error!r}") from error
        context = f"case {number}: {path} {raw[:400]!r} → {answer.status_code} {answer.text[:300]}"
        assert answer.status_code in (200, 400, 404, 413), context
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], context


@contextlib.contextmanager
def chats_beside(stand: Stand) -> Iterator[None]:
    """Asks for the same completion again and again; all must be answered, and alike."""
    stop = threading.Event()
    statuses: list[int] = []
    texts: set[str] = set()

    def chat() -> None:
        body = {"prompt": "one two three", "max_tokens": 2, "temperature": 0}
        while not stop.is_set():
            answer = stand.post("/v1/completions", body)
            statuses.append(answer.status_code)
            if answer.status_code == 200:
                texts.add(answer.json()["choices"][0]["text"])
            stop.wait(0.05)

    beside = threading.Thread(target=chat)
    beside.start()
    try:
        yield
    finally:
        stop.set()
        beside.join()
    assert set(statuses) == {200} and len(texts) == 1


@contextlib.contextmanager
def slow_bodies_beside(stand: Stand, count: int = 8) -> Iterator[None]:
    """Connections whose bodies never end, and ones that are cut off in their midst."""
    host, port = stand.url.removeprefix("http://").split(":")
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        b"content-type: application/json\r\ncontent-length: 900000\r\n\r\n"
    )
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]
        for one in held:
            one.sendall(head + b'{"messages": [')
        for one in held[::2]:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        yield


def test_a_storm_of_bad_bodies(stand: Stand) -> None:
    with chats_beside(stand), slow_bodies_beside(stand):
        storm(stand, 400, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_thousand_bad_bodies_leave_memory_flat(stand: Stand) -> None:
    storm(stand, 1000, seed=2)
    before = rss()
    with chats_beside(stand):
        for seed in range(3, 12):
            with slow_bodies_beside(stand):
                storm(stand, 1000, seed=seed)
            # Other tests read them; here they are no leak of the gateway's.
            stand.router.requests.clear()
    assert rss() - before < 64 * 1024 * 1024


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_huge_bodies_are_not_kept(make_stand: Any) -> None:
    stand = make_stand(max_body_bytes=1024 * 1024)
    piece = b"x" * (1024 * 1024)

    def chunks() -> Any:
        for _ in range(64):
            yield piece

    before = rss()
    for _ in range(3):
        answer = stand.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
        answer = stand.post("/v1/completions", content=piece * 64)
        assert answer.status_code == 413
    # The client's own 64 MiB count too.
    assert rss() - before < 200 * 1024 * 1024
