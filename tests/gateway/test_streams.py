"""What happens around streams: waiting, faults, resuming, clients that leave."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import client as client_module
from gateway import generation
from tests.gateway.conftest import Stand
from tests.gateway.sse import read_events

ROOT = Path(__file__).resolve().parents[2]
BODY = {"prompt": "one two three", "max_tokens": 10, "temperature": 0, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 10, "temperature": 0, "stream": True}


def fault(kind: str) -> dict[str, str]:
    return {"x-request-id": f"fault:{kind}"}


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_a_refusal_before_accepted_is_a_plain_error(stand: Stand, path: str, body: dict[str, Any]) -> None:
    answer = stand.post(path, body, headers=fault("refuse=OVERLOADED"))
    assert answer.status_code == 503 and answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/completions", BODY, None),
        ("/v1/chat/completions", CHAT, None),
        ("/v1/responses", {"input": "one two", "max_output_tokens": 10, "stream": True}, "response.failed"),
        ("/v1/messages", {**CHAT, "temperature": 0}, "error"),
    ],
)
def test_a_failure_after_accepted_is_an_error_event(
    stand: Stand, path: str, body: dict[str, Any], last: str | None
) -> None:
    with stand.http.stream("POST", path, json=body, headers=fault("die=3")) as answer:
        assert answer.status_code == 200
        events = read_events(answer)
    assert all(event.data != "[DONE]" for event in events)
    assert events[-1].name == last
    errors = [event.json for event in events if '"error"' in event.data and event.json.get("error")]
    assert any("two engines died" in str(error["error"]) for error in errors)


def test_a_failure_of_a_plain_answer_is_an_http_error(stand: Stand) -> None:
    answer = stand.post("/v1/completions", {**BODY, "stream": False}, headers=fault("die=3"))
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_crash"


def test_headers_wait_for_accepted_and_then_for_a_limit(make_stand: Any) -> None:
    stand = make_stand(header_delay=0.3)
    with stand.http.stream("POST", "/v1/completions", json=BODY, headers=fault("slow=1.5")) as answer:
        assert answer.status_code == 200
        raw = "".join(answer.iter_text())
    assert raw.count(": keep-alive\n\n") >= 2 and raw.endswith("data: [DONE]\n\n")
    # A refusal that comes after the headers can only be an event.
    with stand.http.stream("POST", "/v1/completions", json=BODY, headers=fault("late=OVERLOADED")) as answer:
        assert answer.status_code == 200 and "overloaded" in "".join(answer.iter_text())


def test_quiet_streams_are_kept_alive(make_stand: Any) -> None:
    stand = make_stand(header_delay=0.2)
    with stand.http.stream("POST", "/v1/completions", json=BODY, headers=fault("hang=0.9")) as answer:
        raw = "".join(answer.iter_text())
    assert raw.count(": keep-alive\n\n") >= 2 and "[DONE]" in raw


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_client_that_leaves_cancels_the_call(stand: Stand, path: str, stream: bool) -> None:
    body = {**({"input": "x"} if "responses" in path else {**CHAT, "prompt": "x"}), "stream": stream}
    name = f"fault:hang=30,{path},{stream}"
    with pytest.raises(httpx.TimeoutException):
        stand.http.post(path, json=body, headers={"x-request-id": name}, timeout=0.5)
    wait_for(lambda: name in stand.router.cancelled)
    wait_for(lambda: stand.router.running == 0)


def test_leaving_before_accepted_cancels_too(stand: Stand) -> None:
    for stream in (True, False):
        name = f"fault:slow=30,{stream}"
        with pytest.raises(httpx.TimeoutException):
            stand.http.post(
                "/v1/completions", json={**BODY, "stream": stream}, headers={"x-request-id": name}, timeout=0.5
            )
    wait_for(lambda: stand.router.running == 0)


def test_leaving_in_the_middle_of_a_stream(stand: Stand) -> None:
    stand.router.token_delay = 0.02
    body = {**BODY, "max_tokens": 1500, "prompt": ["a b", "c d", "e f"]}
    with stand.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: stand.router.running == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_router_is_resumed_without_a_trace(stand: Stand, stream: bool) -> None:
    body = {**BODY, "prompt": "naïve 漢字 😀 one", "temperature": 1, "seed": 5, "n": 2, "stream": False}
    want = stand.post("/v1/completions", body).json()
    if not stream:
        got = stand.post("/v1/completions", body, headers=fault("drop=7")).json()
        assert [c["text"] for c in got["choices"]] == [c["text"] for c in want["choices"]]
        assert got["usage"] == want["usage"]
    else:
        sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with stand.http.stream("POST", "/v1/completions", json=sent, headers=fault("drop=7")) as answer:
            chunks = [event.json for event in read_events(answer)[:-1]]
        for index in range(2):
            text = "".join(
                c["choices"][0]["text"] for c in chunks if c["choices"] and c["choices"][0]["index"] == index
            )
            assert text == want["choices"][index]["text"]
        assert chunks[-1]["usage"] == want["usage"]
    assert stand.router.requests[-1].attempt == 2
    if stream:
        assert sum(len(choice.emitted_ids) for choice in stand.router.requests[-1].resume.choices) == 8


def test_a_router_that_keeps_breaking_ends_in_an_error_event(stand: Stand) -> None:
    with stand.http.stream("POST", "/v1/completions", json=BODY, headers=fault("drops=2")) as answer:
        events = read_events(answer)
    error = events[-1].json["error"]
    assert error["code"] == "unavailable" and "10.0.0.7" not in events[-1].data
    assert len(stand.router.requests) == 1 + generation.MAX_RESUMES


@pytest.mark.parametrize("stream", [True, False])
def test_a_router_lost_before_it_accepts_costs_one_more_try(stand: Stand, stream: bool) -> None:
    body = {**BODY, "stream": stream}
    assert stand.post("/v1/completions", body, headers=fault("lost=1")).status_code == 200
    assert len(stand.router.requests) == 2
    stand.router.requests.clear()
    answer = stand.post("/v1/completions", body, headers=fault("lost=2"))
    assert answer.status_code == 503 and "10.0.0.7" not in answer.text
    assert len(stand.router.requests) == 2


def test_refusals_are_not_tried_again(stand: Stand) -> None:
    for reason in ("OVERLOADED", "NO_ENGINE", "INVALID_FIELD"):
        stand.router.requests.clear()
        assert stand.post("/v1/completions", BODY, headers=fault(f"refuse={reason}")).status_code >= 400
        assert len(stand.router.requests) == 1, reason


def test_old_news_of_the_models_will_do_while_the_router_is_silent(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CALL_TIMEOUT_S", 2.0)
    monkeypatch.setattr(client_module, "MODELS_PATIENCE_S", 0.3)
    stand.post("/v1/completions", {**BODY, "stream": False})
    client = stand.app.state.gateway.client
    client.forget_models()
    stand.router.silent = True
    try:
        assert stand.post("/v1/completions", {**BODY, "stream": False}).status_code == 200
        # Who asks for the models themselves gets no old news.
        assert stand.http.get("/ready").status_code >= 500
    finally:
        stand.router.silent = False


def test_nothing_internal_leaks(stand: Stand) -> None:
    answer = stand.post("/v1/completions", {**BODY, "stream": False}, headers=fault("unavailable"))
    assert answer.status_code == 503 and "/secret/path" not in answer.text and answer.headers["retry-after"]
    answer = stand.post("/v1/completions", {**BODY, "stream": False}, headers=fault("big"))
    assert answer.status_code == 413


def test_a_slow_reader_holds_back_its_stream_only(stand: Stand) -> None:
    """A client that reads nothing must not make the gateway buffer without end, nor block others."""
    address = (stand.url.rsplit(":", 1)[0].removeprefix("http://"), int(stand.url.rsplit(":", 1)[1]))
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = b'{"prompt":"a b c","max_tokens":1500,"temperature":0,"stream":true,"logprobs":20}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        sock.sendall(head + body)
        done = threading.Event()

        def others() -> None:
            for _ in range(3):
                assert stand.post("/v1/completions", {**BODY, "stream": False}).status_code == 200
            done.set()

        threading.Thread(target=others).start()
        assert done.wait(20)
    wait_for(lambda: stand.router.running == 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault_of", ["hang=30", "slow=30"])
def test_a_stop_tells_clients_before_it_ends(make_stand: Any, stream: bool, fault_of: str) -> None:
    """After the grace what still runs ends: a stream with an error event, a plain request with 503."""
    stand = make_stand(grace=0.2, header_delay=0.1)
    got: list[Any] = []

    def ask() -> None:
        body = {**BODY, "stream": stream}
        with httpx.stream(
            "POST", stand.url + "/v1/completions", json=body, headers=fault(fault_of), trust_env=False, timeout=30
        ) as answer:
            got.append((answer.status_code, answer.read().decode()))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: stand.router.running == 1)
    time.sleep(0.3)
    stand.stop()
    asking.join(20)
    ((status, text),) = got
    assert status == (200 if stream else 503) and "shutting_down" in text and "[DONE]" not in text
    wait_for(lambda: stand.router.running == 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_with_zero(mock: Any, number: signal.Signals) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = (
        "from gateway.main import run; from gateway.settings import GatewaySettings;"
        f"raise SystemExit(run(GatewaySettings(port={port}, router='127.0.0.1:{mock[1]}', grace=20)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(url), 60)
        with httpx.stream(
            "POST", url + "/v1/completions", json=BODY, headers=fault("hang=2"), trust_env=False, timeout=30
        ) as answer:
            process.send_signal(number)
            text = answer.read().decode()
        # SIGTERM lets the request finish; SIGINT ends it with an error.
        assert ("[DONE]" in text) == (number is signal.SIGTERM)
        assert ("shutting_down" in text) == (number is signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", trust_env=False, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
