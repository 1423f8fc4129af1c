"""Bad input: the right status, OpenAI's error object with the field to blame, and a gateway that lives on."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from gateway.errors import CODES, REASONS, from_tandem
from tandem.errors import REASONS as ALL_REASONS
from tandem.errors import TandemError
from tests.gateway.conftest import Stand

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
BOTH = [CHAT, COMPLETION]


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    start: dict[str, Any] = (
        {"prompt": "hello"} if path == COMPLETION else {"messages": [{"role": "user", "content": "x"}]}
    )
    return {"max_tokens": 4, **start, **fields}


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "ten"),
        ("max_tokens", 4.5),
        ("max_tokens", -5),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", 2.1),
        ("temperature", True),
        ("top_p", {}),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_k", -2),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 17),
        ("n", 10**9),
        ("seed", "abc"),
        ("seed", 2**64),
        ("stop", 5),
        ("stop", [1, 2]),
        ("stop", ""),
        ("stop", ["x"] * 65),
        ("stop", "x" * 1025),
        ("stream", "maybe"),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("logit_bias", [1]),
        ("logit_bias", {"cat": 5}),
        ("logit_bias", {"-3": 5}),
        ("logit_bias", {"49152": 5}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"٣": 1}),
        ("stop_token_ids", [49152]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("min_tokens", 5),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("guided_json", "{"),
        ("guided_json", "5"),
        ("guided_json", False),
        ("structured_outputs", {"json": "nonsense"}),
        ("structured_outputs", {"structural_tag": "nonsense"}),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("prompt_logprobs", 21),
        ("priority", 2**40),
        ("model", 5),
    ],
)
def test_a_bad_value_is_a_400_that_names_the_field(stand: Stand, path: str, field: str, value: Any) -> None:
    error = error_of(stand.post(path, body_of(path, **{field: value})), 400)
    assert error["param"] == field or str(error["param"]).startswith(field), error


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hi", "messages"),
        ([], "messages"),
        ([123], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
    ],
)
def test_bad_messages(stand: Stand, messages: Any, param: str) -> None:
    error = error_of(stand.post(CHAT, {"messages": messages}), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], 5, {}, [True], [1, "a"], [[1], "a"], [1.5], [-1], [49152], [10**30], ["a", ""]]
)
def test_bad_prompts(stand: Stand, prompt: Any) -> None:
    assert error_of(stand.post(COMPLETION, {"prompt": prompt}), 400)["param"] == "prompt"


def test_rules_between_fields(stand: Stand) -> None:
    assert error_of(stand.post(CHAT, body_of(CHAT, max_tokens=0)), 400)["param"] == "max_tokens"
    assert error_of(stand.post(CHAT, body_of(CHAT, top_logprobs=2)), 400)["param"] == "top_logprobs"
    assert error_of(stand.post(CHAT, body_of(CHAT, logprobs=True, top_logprobs=21)), 400)["param"] == "top_logprobs"
    assert error_of(stand.post(CHAT, body_of(CHAT, modalities=["audio"])), 400)["param"] == "modalities"
    assert error_of(stand.post(COMPLETION, body_of(COMPLETION, logprobs=21)), 400)["param"] == "logprobs"


def test_null_means_the_default(stand: Stand) -> None:
    from gateway.schemas.chat import ChatBody

    nulls = {name: None for name in ChatBody.model_fields if name not in ("messages", "max_tokens")}
    a = stand.post(CHAT, {**nulls, **body_of(CHAT), "seed": 1})
    b = stand.post(CHAT, {**body_of(CHAT), "seed": 1})
    assert a.status_code == 200, a.text
    assert a.json()["choices"] == b.json()["choices"]


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("raw", [b"", b"null", b"[1]", b'"x"', b"5", b"{", b'{"model": "x", ]', b"\xff\xfe", b"{} {}"])
def test_what_is_no_json_object(stand: Stand, path: str, raw: bytes) -> None:
    assert error_of(stand.post(path, content=raw), 400)["code"] == "invalid_json"


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"', "9" * 400])
def test_hostile_literals(stand: Stand, path: str, literal: str) -> None:
    for field in ("temperature", "seed", "user"):
        raw = json.dumps(body_of(path, **{field: "@"})).replace('"@"', literal).encode()
        answer = stand.post(path, content=raw)
        if field == "user" and literal[0] == '"':
            assert answer.status_code == 400
        error_of(answer, 400)


@pytest.mark.parametrize("path", BOTH)
def test_deep_nesting(stand: Stand, path: str) -> None:
    for depth, opening, closing in ((100_000, "[", "]"), (900, "[", "]"), (50_000, '{"a":', "}")):
        core = opening * depth + ("1" if opening != "[" else "") + closing * depth
        for field in ("stop", "structured_outputs", "response_format", "logit_bias"):
            raw = json.dumps(body_of(path, **{field: "@"})).replace('"@"', core).encode()
            error_of(stand.post(path, content=raw), 400)


def test_nesting_inside_what_is_passed_on(stand: Stand) -> None:
    """Deep but legal JSON in a schema, a tool and template variables: an answer or a 400, never a 500."""
    deep: Any = {}
    for _ in range(110):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    for fields in (
        {"guided_json": deep},
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": "required"},
        {"chat_template_kwargs": deep},
    ):
        assert stand.post(CHAT, body_of(CHAT, **fields)).status_code in (200, 400)


def test_unknown_models_are_404_and_those_served_are_listed(stand: Stand) -> None:
    for path in BOTH:
        error = error_of(stand.post(path, body_of(path, model="no-such-model")), 404)
        assert "no-such-model" in error["message"] and "smollm2" in error["message"]
        assert error["param"] == "model" and error["code"] == "model_not_found"
    error_of(stand.http.get("/v1/models/no/such"), 404)


def test_an_alias_is_the_model(stand: Stand) -> None:
    assert stand.post(CHAT, body_of(CHAT, model="alias/model")).json()["model"] == "alias/model"
    assert stand.http.get("/v1/models/alias/model").json()["id"] == "alias/model"


def test_unknown_routes_and_methods(stand: Stand) -> None:
    assert error_of(stand.http.get("/v1/nothing"), 404)["code"] == "unknown_url"
    assert error_of(stand.http.post("/nothing"), 404)
    answer = stand.http.get(CHAT)
    assert error_of(answer, 405)["code"] == "method_not_allowed" and answer.headers["allow"] == "POST"
    assert stand.http.get("/v1/messages").json()["type"] == "error"


@pytest.mark.parametrize("path", [*BOTH, "/v1/responses", "/v1/messages"])
def test_too_long_a_prompt_names_both_numbers(stand: Stand, path: str) -> None:
    text = "word " * 3000
    body: dict[str, Any] = {"max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    if path == COMPLETION:
        body = {"prompt": text, "max_tokens": 4}
    elif path == "/v1/responses":
        body = {"input": text}
    answer = stand.post(path, body)
    assert answer.status_code == 400
    assert "maximum context length is 2048" in answer.text and "you requested 30" in answer.text
    assert not stand.router.requests


def test_max_tokens_beyond_the_context_is_not_clamped(stand: Stand) -> None:
    error = error_of(stand.post(CHAT, body_of(CHAT, max_tokens=2048)), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert "2048" in error["message"]


def test_no_engine_is_503_with_retry_after(make_stand: Any) -> None:
    stand = make_stand()
    stand.router.served = False
    try:
        for path in BOTH:
            answer = stand.post(path, body_of(path, model="smollm2-135m-instruct"))
            assert error_of(answer, 503)["code"] == "no_engine" and answer.headers["retry-after"] == "3"
        assert stand.http.get("/v1/models").json()["data"] == []
        assert error_of(stand.http.get("/ready"), 503)["code"] == "not_ready"
        assert stand.http.get("/health").status_code == 200
    finally:
        stand.router.served = True


def test_no_router_is_503(make_stand: Any) -> None:
    stand = make_stand(router="127.0.0.1:1")
    answer = stand.post(CHAT, body_of(CHAT))
    assert error_of(answer, 503) and answer.headers["retry-after"] and "127.0.0.1:1" not in answer.text


def test_too_large_a_body_is_413(make_stand: Any) -> None:
    stand = make_stand(max_body_bytes=10_000)
    big = json.dumps(body_of(CHAT, user="x" * 20_000)).encode()
    assert error_of(stand.post(CHAT, content=big), 413)["code"] == "request_too_large"

    def chunks() -> Any:
        for _ in range(40):
            yield b" " * 1000

    assert error_of(stand.post(CHAT, content=chunks()), 413)
    assert stand.post(CHAT, body_of(CHAT)).status_code == 200


def test_a_slow_body_is_408(make_stand: Any) -> None:
    import socket

    stand = make_stand(body_timeout=0.3)
    host, port = stand.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert b"408" in sock.recv(4096).split(b"\r\n")[0]


def test_bad_headers(stand: Stand) -> None:
    for value in ("0", "-1", "soon", "9" * 30, "٣"):
        answer = stand.post(CHAT, body_of(CHAT), headers={"x-request-timeout-ms": value.encode()})
        assert error_of(answer, 400)["param"] == "x-request-timeout-ms"
    assert stand.post(CHAT, body_of(CHAT), headers={"x-request-timeout-ms": "30000"}).status_code == 200
    assert stand.router.requests[-1].timeout_ms == 30000


def test_a_deadline_holds_though_the_router_is_silent(stand: Stand) -> None:
    headers = {"x-request-timeout-ms": "200", "x-request-id": "fault:slow=30"}
    answer = stand.post(CHAT, body_of(CHAT), headers=headers)
    assert error_of(answer, 504)["code"] == "timeout"
    # After *accepted* the status has been sent: the error is an event, and the stream ends.
    headers["x-request-id"] = "fault:hang=30"
    stream = stand.post(CHAT, body_of(CHAT, stream=True), headers=headers)
    assert stream.status_code == 200
    last = [line for line in stream.text.splitlines() if line.startswith("data: {")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"


def test_request_ids_are_echoed_or_made(stand: Stand) -> None:
    answer = stand.post(CHAT, body_of(CHAT), headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and stand.router.requests[-1].request_id == "mine-1"
    for bad_id in ("a b", "x" * 300):
        answer = stand.post(CHAT, body_of(CHAT), headers={"x-request-id": bad_id})
        assert answer.headers["x-request-id"].startswith("req_")
    assert stand.http.get("/v1/nothing").headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("reason", sorted(ALL_REASONS - {"UNSPECIFIED"}))
def test_every_reason_has_a_row(stand: Stand, reason: str) -> None:
    status, kind, code = REASONS[reason]
    if reason in ("UNAUTHENTICATED", "INTERNAL"):
        shown = from_tandem(TandemError(reason, "secret detail"))
        assert shown.status == 500 and "secret" not in shown.message
    answer = stand.post(COMPLETION, body_of(COMPLETION), headers={"x-request-id": f"fault:refuse={reason}"})
    error = error_of(answer, status)
    assert (error["type"], error["code"]) == (kind, code)
    assert ("retry-after" in answer.headers) == (status in (429, 503))


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_code_has_a_form_that_tells_nothing(code: grpc.StatusCode) -> None:
    shown = from_tandem(TandemError("UNSPECIFIED", "10.0.0.7 refused", code=code))
    assert "10.0.0.7" not in shown.message and 400 <= shown.status < 600
    assert code in CODES or shown.status == 500


def test_a_bad_content_part_is_named_itself(stand: Stand) -> None:
    """Not "should be a string" for the whole list."""
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": 5}]}]}
    error = stand.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "messages[0].content[1].text" and "5" in error["message"]
