"""The tracer alone: switched off, settings, sampling, headers, and a collector that is slow, dead or comes back."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import opentelemetry.semconv.schemas
import pytest
from opentelemetry import semconv
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from router.settings import RouterSettings
from tandem.settings import SettingsError, load_settings
from tandem.tracing import NULL_SPAN, NULL_TRACER, names, open_tracer, queue
from tandem.tracing.otlp import OtlpTracer, trace_headers
from tandem.tracing.queue import SpanQueue
from tests.tandem.tracing.receiver import Receiver, grpc_receiver, http_receiver

ROOT = Path(__file__).resolve().parents[3]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with grpc_receiver() as made:
        yield made


def tracer(endpoint: str, env: dict[str, str] | None = None, **settings: object) -> OtlpTracer:
    values = {"otlp_endpoint": endpoint, **settings}
    made = open_tracer(RouterSettings(**values), "router", env or {})  # type: ignore[arg-type]
    assert isinstance(made, OtlpTracer)
    return made


# -- switched off


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_without_an_endpoint_the_tracer_is_the_null_one(env: dict[str, str]) -> None:
    made = open_tracer(RouterSettings(), "router", env)
    assert made is NULL_TRACER and not made.on
    # The headers are not even looked at.
    span = made.serve("route", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert span is NULL_SPAN is span.child("x")
    assert (span.recording, span.headers, span.trace_id) == (False, (), "")


def test_disabling_the_sdk_wins_over_the_setting() -> None:
    settings = RouterSettings(otlp_endpoint="http://127.0.0.1:1")
    assert open_tracer(settings, "router", {"OTEL_SDK_DISABLED": "true"}) is NULL_TRACER


# -- settings


@pytest.mark.parametrize(
    "value", ["collector:4317", "ftp://x", "http://", "http://h:0", "http://h:99999", "http://u:p@h:1", "http://h?x=1"]
)
def test_an_endpoint_that_is_no_url_is_refused_with_its_value(value: str) -> None:
    with pytest.raises(SettingsError, match="--otlp-endpoint") as caught:
        load_settings(RouterSettings, flags={"otlp_endpoint": value}, env={})
    assert repr(value) in str(caught.value)


def test_an_unknown_protocol_is_refused_wherever_it_comes_from() -> None:
    with pytest.raises(SettingsError, match="--otlp-protocol"):
        load_settings(RouterSettings, flags={"otlp_protocol": "zipkin"}, env={})
    settings = RouterSettings(otlp_endpoint="http://127.0.0.1:1")
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'"):
        open_tracer(settings, "router", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_without_the_extra_a_setting_is_an_error_and_a_variable_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tandem.tracing.otlp", None)
    with pytest.raises(SettingsError, match=r"tandem-llm\[traces\]"):
        open_tracer(RouterSettings(otlp_endpoint="http://127.0.0.1:1"), "router", {})
    assert open_tracer(RouterSettings(), "router", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:1"}) is NULL_TRACER


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_both_protocols_reach_their_receiver(protocol: str) -> None:
    with grpc_receiver() if protocol == "grpc" else http_receiver() as receiver:
        made = tracer(receiver.endpoint, otlp_protocol=protocol)
        made.serve("route", lambda: ()).end()
        made.close()
        span = receiver.one("route")
        assert span.service == "tandem-router" and span.resource["service.namespace"] == "tandem"
        assert span.resource["service.version"] and span.resource["service.instance.id"]


def test_the_standard_variables_do_without_a_setting(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_SERVICE_NAME": "mine"}
    for name, value in {**env, "OTEL_EXPORTER_OTLP_HEADERS": "x-token=abc"}.items():
        # The exporter reads them itself.
        monkeypatch.setenv(name, value)
    made = tracer("", env)
    made.serve("route", lambda: ()).end()
    made.close()
    assert receiver.one("route").service == "mine"
    assert receiver.metadata[0]["x-token"] == "abc"


# -- names


def test_names_are_those_of_the_pinned_conventions() -> None:
    known: set[str] = set()
    for path in Path(semconv.__path__[0]).rglob("*_attributes.py"):
        known |= set(re.findall(r'^\w+: Final = "([\w.]+)"', path.read_text(), re.M))
    assert "gen_ai.request.model" in known
    ours = {
        value for key, value in vars(names).items() if key.isupper() and "." in value and not key.endswith("VERSION")
    }
    ours -= {names.SCHEMA_URL}
    assert {name for name in ours if not name.startswith("tandem.")} <= known
    assert names.SCHEMA_URL in {schema.value for schema in opentelemetry.semconv.schemas.Schemas}
    assert f"semantic conventions {names.SEMCONV_VERSION}" in (ROOT / "docs/operations.md").read_text()


def test_names_in_the_code_are_ours_or_in_the_table() -> None:
    """No attribute of the conventions is spelled out elsewhere, where the check above would not see it."""
    for folder in ("gateway", "router", "engine_service", "draft_service"):
        for path in (ROOT / folder).glob("tracing.py"):
            assert not re.findall(r'"((?:gen_ai|http|rpc|url|error)\.[\w.]+)"', path.read_text()), path


# -- headers


@pytest.mark.parametrize(
    "entries",
    [
        [("traceparent", "nonsense")],
        [("traceparent", "00-" + "0" * 32 + "-b7ad6b7169203331-01")],
        [("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)],
        [("traceparent", b"\xff\xfe")],
        [("tracestate", "a=b")],
    ],
)
def test_headers_that_are_no_trace_start_a_new_one(receiver: Receiver, entries: list[tuple[str, str | bytes]]) -> None:
    made = tracer(receiver.endpoint)
    span = made.serve("route", lambda: entries)
    span.end()
    made.close()
    assert receiver.one("route").parent_id == ""
    assert dict(span.headers)["traceparent"].split("-")[1] != TRACEPARENT.split("-")[1]


def test_tracestate_is_handed_on_and_bad_entries_are_not(receiver: Receiver) -> None:
    made = tracer(receiver.endpoint)
    entries: list[tuple[str, str | bytes]] = [
        ("traceparent", TRACEPARENT),
        ("tracestate", "a=1"),
        ("tracestate", "b=2,B\xe9=\xff"),
        ("other", "x"),
    ]
    assert trace_headers(lambda: entries)["tracestate"] == "a=1,b=2,B\xe9=\xff"
    span = made.serve("route", lambda: entries)
    # gRPC metadata takes printable ASCII only.
    assert dict(span.headers).get("tracestate", "").isascii()
    made.close()


def test_a_child_has_the_times_that_it_is_given(receiver: Receiver) -> None:
    made = tracer(receiver.endpoint)
    at = time.monotonic()
    span = made.serve("route", lambda: (), at)
    span.child("queue", at + 1).end(at + 3)
    span.end(at + 4)
    made.close()
    route, part = receiver.one("route"), receiver.one("queue")
    assert part.parent_id == route.span_id and part.trace_id == route.trace_id
    assert part.start - route.start == pytest.approx(1e9, abs=2e3)
    assert part.end - part.start == pytest.approx(2e9, abs=2e3)
    assert abs(route.start / 1e9 - time.time()) < 60


def test_a_client_cannot_make_a_span_grow(receiver: Receiver) -> None:
    made = tracer(receiver.endpoint)
    span = made.serve("route", lambda: ())
    span.set({names.REQUEST_MODEL: "x" * 1_000_000})
    for _ in range(1000):
        span.event("attempt")
    span.end()
    made.close()
    assert len(receiver.one("route").attributes[names.REQUEST_MODEL]) == 256
    assert len(receiver.one("route").events) == 64


def test_errors_of_ours_are_errors_and_those_of_callers_are_told(receiver: Receiver) -> None:
    made = tracer(receiver.endpoint)
    for name, ours in (("broken", True), ("refused", False)):
        span = made.serve(name, lambda: ())
        span.fail("REASON", ours=ours)
        span.end()
    made.close()
    for name, ours in (("broken", True), ("refused", False)):
        assert receiver.one(name).attributes["error.type"] == "REASON"
        assert receiver.one(name).error is ours


def test_the_ratio_samples_that_share(receiver: Receiver) -> None:
    made = tracer(receiver.endpoint, trace_sample_ratio=0.25)
    kept = 0
    for _ in range(2000):
        span = made.serve("route", lambda: ())
        kept += span.recording
        assert int(dict(span.headers)["traceparent"][-2:], 16) & 1 == span.recording
    assert 400 < kept < 600  # 5 standard deviations around 500
    assert made.serve("route", lambda: [("traceparent", TRACEPARENT)]).recording
    made.close()


# -- the queue


class Blocked(SpanExporter):
    """Takes nothing until it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.taken = 0

    def export(self, spans: object) -> SpanExportResult:
        self.entered.set()
        self.gate.wait(20)
        self.taken += len(spans)  # type: ignore[arg-type]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.gate.set()


def fill(under_test: SpanQueue, count: int) -> None:
    from opentelemetry.sdk.trace import ReadableSpan

    for number in range(count):
        under_test.on_end(ReadableSpan(f"span {number}"))


def metric(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def test_a_full_queue_drops_and_counts_and_never_blocks() -> None:
    exporter, registry = Blocked(), CollectorRegistry()
    under_test = SpanQueue(exporter, "test", max_queued=10, max_batch=4, interval_s=0.01)
    under_test.watch(registry)
    fill(under_test, 4)
    assert exporter.entered.wait(10)
    # The collector hangs: nothing of this waits for it.
    fill(under_test, 20)
    assert under_test.dropped == {"queue_full": 14}
    assert metric(registry, "tandem_trace_spans_dropped_total", reason="queue_full") == 14
    exporter.gate.set()
    assert under_test.force_flush(10_000)
    under_test.close()
    assert exporter.taken == under_test.exported == 10
    assert metric(registry, "tandem_trace_spans_exported_total") == 10
    fill(under_test, 1)
    assert metric(registry, "tandem_trace_spans_dropped_total", reason="shutdown") == 1


def test_closing_sends_what_waits_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = Blocked()
    quick.gate.set()
    under_test = SpanQueue(quick, "test", interval_s=60)
    fill(under_test, 1300)
    under_test.close()
    assert quick.taken == 1300
    monkeypatch.setattr(queue, "CLOSE_S", 0.05)
    # One that hangs for longer than anybody waits, whatever it is told.
    hung = Blocked()
    monkeypatch.setattr(hung, "shutdown", lambda: None)
    under_test = SpanQueue(hung, "test", interval_s=0.01)
    fill(under_test, 3)
    closer = threading.Thread(target=under_test.close)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
    assert under_test.dropped == {"shutdown": 3}
    hung.gate.set()


def test_a_collector_that_comes_back_gets_what_comes_then(
    free_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tandem.tracing")
    monkeypatch.setattr(queue, "INTERVAL_S", 0.01)
    # The exporter retries by itself until its time is up.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    made = tracer(f"http://127.0.0.1:{free_port}")
    made.serve("lost", lambda: ()).end()
    end = time.monotonic() + 20
    while not made.queue.dropped and time.monotonic() < end:
        time.sleep(0.01)
    assert made.queue.dropped == {"export_failed": 1}
    with grpc_receiver(f"127.0.0.1:{free_port}") as receiver:
        while not receiver.spans and time.monotonic() < end:
            made.serve("found", lambda: ()).end()
            time.sleep(0.05)
        made.close()
        assert {span.name for span in receiver.spans} == {"found"}
    told = [record.getMessage() for record in caplog.records if record.name == "tandem.tracing"]
    assert told.count("traces cannot be sent") == 1 and told.count("traces are sent again") == 1


def test_an_exporter_that_raises_is_a_failed_export() -> None:
    class Broken(Blocked):
        def export(self, spans: object) -> SpanExportResult:
            raise grpc.RpcError("surprise")

    under_test = SpanQueue(Broken(), "test", interval_s=0.01)
    fill(under_test, 2)
    assert under_test.force_flush(10_000)
    under_test.close()
    assert under_test.dropped == {"export_failed": 2}
