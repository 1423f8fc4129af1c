"""Spans by OpenTelemetry's SDK. Imported only where an endpoint is set."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry

from tandem import __version__
from tandem.settings import TracedSettings
from tandem.tracing import Carrier, Span, Tracer, Value, endpoint_of, names
from tandem.tracing.queue import SpanQueue

_PROPAGATOR = TraceContextTextMapPropagator()
# One request's span may not grow without bounds, whatever a client sends.
_LIMITS = SpanLimits(max_span_attributes=64, max_events=64, max_event_attributes=32, max_attribute_length=256)
_TRACES_PATH = "/v1/traces"


class OtlpSpan(Span):
    """A span of the SDK. One that is not sampled still hands its trace on, so that all services decide alike."""

    __slots__ = ("_context", "_offset", "_span", "_tracer", "headers", "recording", "trace_id")

    def __init__(self, tracer: SdkTracer, span: SdkSpan, offset: int, calls: bool = True) -> None:
        """offset: Unix time minus time.monotonic(), nanoseconds; one value for all spans of a request.

        calls: other services will be children of it.
        """
        self._tracer = tracer
        self._span = span
        self._offset = offset
        self._context = set_span_in_context(span)
        self.recording = span.is_recording()
        carrier: dict[str, str] = {}
        if calls:
            _PROPAGATOR.inject(carrier, self._context)
        self.headers = tuple(carrier.items())
        self.trace_id = f"{span.get_span_context().trace_id:032x}" if self.recording else ""

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        self._span.add_event(name, attributes)

    def fail(self, reason: str, ours: bool = True) -> None:
        self._span.set_attribute(names.ERROR_TYPE, reason)
        if ours:
            self._span.set_status(Status(StatusCode.ERROR, reason))

    def child(self, name: str, started: float | None = None, calls: bool = False) -> Span:
        kind = SpanKind.CLIENT if calls else SpanKind.INTERNAL
        made = self._tracer.start_span(name, self._context, kind=kind, start_time=self._unix_ns(started))
        return OtlpSpan(self._tracer, made, self._offset, calls)

    def end(self, at: float | None = None) -> None:
        self._span.end(self._unix_ns(at))

    def _unix_ns(self, at: float | None) -> int:
        return (time.monotonic_ns() if at is None else int(at * 1e9)) + self._offset


class OtlpTracer(Tracer):
    """Makes spans, and sends them in a thread of its own."""

    on = True

    def __init__(self, settings: TracedSettings, service: str, protocol: str, env: Mapping[str, str]) -> None:
        attributes = {
            "service.name": env.get("OTEL_SERVICE_NAME") or f"tandem-{service}",
            "service.namespace": "tandem",
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}/{os.getpid()}",
        }
        # Not the whole URL: one from the standard variables may hold a password.
        place = urlsplit(endpoint_of(settings, env))
        self.queue = SpanQueue(make_exporter(settings.otlp_endpoint, protocol), f"{place.hostname}:{place.port or ''}")
        # Not the process's global provider: instrumentation of others is none of ours, and tests have several.
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.trace_sample_ratio)),
            resource=Resource.create(attributes),
            span_limits=_LIMITS,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self.queue)
        self._tracer = provider.get_tracer("tandem", __version__, names.SCHEMA_URL)

    def serve(self, name: str, carrier: Carrier, started: float | None = None) -> Span:
        offset = time.time_ns() - time.monotonic_ns()
        at = (time.monotonic_ns() if started is None else int(started * 1e9)) + offset
        parent = _PROPAGATOR.extract(trace_headers(carrier))
        span = self._tracer.start_span(name, parent, kind=SpanKind.SERVER, start_time=at)
        return OtlpSpan(self._tracer, span, offset)

    def watch(self, registry: CollectorRegistry) -> None:
        self.queue.watch(registry)

    def close(self) -> None:
        self.queue.close()


def trace_headers(carrier: Carrier) -> dict[str, str]:
    """traceparent and tracestate of a request. Several traceparents are none, as W3C has it."""
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in carrier() or ():
        if name in found:
            found[name].append(value if isinstance(value, str) else value.decode("latin-1"))
    if len(found["traceparent"]) != 1:
        return {}
    result = {"traceparent": found["traceparent"][0]}
    if found["tracestate"]:
        result["tracestate"] = ",".join(found["tracestate"])
    return result


def make_exporter(endpoint: str, protocol: str) -> SpanExporter:
    """The exporter for "grpc" or "http/protobuf". An empty endpoint leaves it to the standard variables.

    TLS files, headers (tokens), compression and time limit come from OTEL_EXPORTER_OTLP_… in any case.
    """
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint or None)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter

    if endpoint and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + _TRACES_PATH
    return HttpSpanExporter(endpoint or None)
