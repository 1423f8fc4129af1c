"""The gateway's span of an HTTP request: names and attributes of the conventions, errors, and what is not traced."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Stand
from tests.gateway.mock_router import MODEL
from tests.gateway.test_mcp import talk
from tests.tandem.tracing.receiver import Received, Receiver, grpc_receiver

CHAT = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 5}
STREAM = {**CHAT, "stream": True}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr("tandem.tracing.queue.INTERVAL_S", 0.01)
    with grpc_receiver() as made:
        yield made


@pytest.fixture
def traced(receiver: Receiver, make_stand: Any) -> Stand:
    stand: Stand = make_stand(otlp_endpoint=receiver.endpoint)
    return stand


def span_of(receiver: Receiver, name: str) -> Received:
    """The only span: one per HTTP request, whatever the request does."""
    (span,) = receiver.wait(name)
    assert len(receiver.spans) == 1
    return span


def test_a_chat_has_the_attributes_of_the_conventions(traced: Stand, receiver: Receiver) -> None:
    body = {
        **CHAT,
        "model": MODEL,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "seed": 2**64 - 1,
        "n": 2,
    }
    answer = traced.post("/v1/chat/completions", body, headers={"x-request-id": "mine"})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    span = span_of(receiver, "POST /v1/chat/completions")
    assert (span.kind, span.service, span.error, span.parent_id) == ("SERVER", "tandem-gateway", False, "")
    ttft = span.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < ttft < (span.end - span.start) / 1e9
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.frequency_penalty": 0.5,
        "gen_ai.request.presence_penalty": -0.5,
        "gen_ai.request.seed": -1,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.output.type": "text",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "tandem.request_id": "mine",
        "tandem.engine": "mock:1",
    }


def test_a_stream_is_one_span_to_its_end(traced: Stand, receiver: Receiver) -> None:
    traced.router.token_delay = 0.02
    answer = traced.post("/v1/chat/completions", STREAM)
    assert answer.text.endswith("data: [DONE]\n\n")
    span = span_of(receiver, "POST /v1/chat/completions")
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert span.end - span.start > 4 * 20_000_000


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": ["a b", "c d"], "max_tokens": 2}, "text_completion"),
        ("/v1/embeddings", {"input": "a b"}, "embeddings"),
        ("/v1/messages", {**CHAT, "model": MODEL}, "chat"),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 16}, "chat"),
    ],
)
def test_every_endpoint_names_its_operation(
    traced: Stand, receiver: Receiver, path: str, body: dict[str, Any], operation: str
) -> None:
    answer = traced.post(path, body)
    assert answer.status_code == 200, answer.text
    span = span_of(receiver, f"POST {path}")
    assert span.attributes["gen_ai.operation.name"] == operation
    assert span.attributes["gen_ai.response.model"] == MODEL
    assert span.attributes["gen_ai.usage.input_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "request_id", "status", "reason", "error"),
    [
        ({**CHAT, "model": "gpt-9"}, "a", 404, "model_not_found", False),
        ({**CHAT, "temperature": 99}, "a", 400, "invalid_value", False),
        (CHAT, "fault:refuse=OVERLOADED", 503, "overloaded", True),
        (CHAT, "fault:refuse=INTERNAL", 500, "internal_error", True),
        # Headers are out: the error is an event of the stream.
        (STREAM, "fault:die=2", 200, "engine_crash", True),
    ],
)
def test_errors_tell_their_reason(
    traced: Stand, receiver: Receiver, body: dict[str, Any], request_id: str, status: int, reason: str, error: bool
) -> None:
    answer = traced.post("/v1/chat/completions", body, headers={"x-request-id": request_id})
    assert answer.status_code == status
    span = span_of(receiver, "POST /v1/chat/completions")
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes["error.type"] == reason
    # By the conventions a 4xx is no error of a server.
    assert span.error is error


def test_a_client_that_hangs_up_is_no_error_of_ours(traced: Stand, receiver: Receiver) -> None:
    traced.router.token_delay = 0.05
    with traced.http.stream("POST", "/v1/chat/completions", json={**STREAM, "max_tokens": 500}) as answer:
        next(answer.iter_lines())
    span = span_of(receiver, "POST /v1/chat/completions")
    assert span.attributes["error.type"] == "client_closed" and not span.error


def test_a_stream_whose_router_is_lost_tells_that_it_went_on(traced: Stand, receiver: Receiver) -> None:
    answer = traced.post("/v1/chat/completions", STREAM, headers={"x-request-id": "fault:drop=2"})
    assert answer.text.endswith("data: [DONE]\n\n")
    span = span_of(receiver, "POST /v1/chat/completions")
    assert span.event("resume")["tandem.attempt"] == 2
    assert not span.error


def test_what_is_polled_is_not_traced_and_the_log_names_the_trace(
    traced: Stand, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.request")
    for path in ("/", "/health", "/ready", "/version", "/metrics", "/openapi.json"):
        traced.http.get(path)
    assert traced.http.get("/v1/models").status_code == 200
    span = span_of(receiver, "GET /v1/models")
    (record,) = [r for r in caplog.records if r.name == "gateway.request" and getattr(r, "path", "") == "/v1/models"]
    assert getattr(record, "trace_id") == span.trace_id  # noqa: B009


def test_a_tool_call_of_an_agent_is_traced(traced: Stand, receiver: Receiver) -> None:
    async def work(client: Any) -> Any:
        return await client.call_tool("chat", {"messages": CHAT["messages"], "max_tokens": 6})

    assert not talk(traced.url, work).is_error
    end = time.monotonic() + 10
    while not (spans := [s for s in receiver.named("POST /mcp") if "gen_ai.operation.name" in s.attributes]):
        assert time.monotonic() < end
        time.sleep(0.01)
    (span,) = spans
    assert span.attributes["gen_ai.operation.name"] == "chat" and span.attributes["gen_ai.request.max_tokens"] == 6
    assert span.attributes["gen_ai.usage.output_tokens"] == 6 and not span.error


def test_metrics_count_spans(traced: Stand, receiver: Receiver) -> None:
    traced.http.get("/v1/models")
    receiver.wait("GET /v1/models")
    end = time.monotonic() + 10
    while "tandem_trace_spans_exported_total 1.0" not in traced.http.get("/metrics").text:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert 'tandem_trace_spans_dropped_total{reason="queue_full"} 0.0' in traced.http.get("/metrics").text


def test_hostile_headers_break_nothing(traced: Stand, receiver: Receiver) -> None:
    """Headers that are no W3C trace context are as good as none; what is handed on in metadata stays printable."""
    for parent, state in (
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"\xff=\xfe,a=b"),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"," * 5000),
        ("ff-x", b"a=b"),
    ):
        headers = [(b"traceparent", parent.encode()), (b"tracestate", state)]
        answer = httpx.post(
            f"{traced.url}/v1/chat/completions", json=CHAT, headers=httpx.Headers(headers), trust_env=False
        )
        assert answer.status_code == 200, answer.text


def test_clients_cannot_invent_span_names(traced: Stand, receiver: Receiver) -> None:
    assert traced.http.request("PROPFIND", "/v1/models").status_code == 405
    assert traced.http.get("/v1/nothing/here").status_code == 404
    (lost,) = receiver.wait("GET")
    assert lost.attributes["url.path"] == "/v1/nothing/here" and "http.route" not in lost.attributes
    end = time.monotonic() + 10
    while len(receiver.spans) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    (other,) = [span for span in receiver.spans if span is not lost]
    assert other.attributes["http.request.method"] == "_OTHER"
    assert other.name in ("HTTP", "HTTP /v1/models")


def test_without_tracing_a_request_has_the_null_span(stand: Stand) -> None:
    from tandem.tracing import NULL_TRACER

    assert stand.app.state.gateway.tracer is NULL_TRACER
    assert "tandem_trace" not in stand.http.get("/metrics").text
