"""A real OTLP receiver, gRPC or HTTP, in the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

ERROR = trace_pb2.Status.STATUS_CODE_ERROR


@dataclass
class Received:
    """One span as it came over the wire."""

    name: str
    service: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    error: bool
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]
    schema_url: str
    trace_state: str

    def event(self, name: str) -> dict[str, Any]:
        """Attributes of the only event of this name."""
        (found,) = [attributes for known, attributes in self.events if known == name]
        return found


@dataclass
class Receiver:
    """What has arrived, in order."""

    endpoint: str = ""
    spans: list[Received] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    requests: int = 0
    # Called before each answer; may block or raise.
    hook: Callable[[], None] = lambda: None

    def take(self, message: pb.ExportTraceServiceRequest, metadata: dict[str, str]) -> None:
        self.requests += 1
        self.hook()
        self.metadata.append(metadata)
        self.raw.append(message.SerializeToString())
        for resource_spans in message.resource_spans:
            resource = _values(resource_spans.resource.attributes)
            for scope in resource_spans.scope_spans:
                self.spans += [_received(span, resource, scope.schema_url) for span in scope.spans]

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Received:
        (found,) = self.named(name)
        return found

    def wait(self, *names: str, seconds: float = 10.0) -> list[Received]:
        """The first span of each name, waiting until all are there."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if all(self.named(name) for name in names):
                return [self.named(name)[0] for name in names]
            time.sleep(0.01)
        raise AssertionError(f"of {names} only {sorted({span.name for span in self.spans})} came")


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def _values(attributes: Any) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in attributes}


def _received(span: trace_pb2.Span, resource: dict[str, Any], schema_url: str) -> Received:
    return Received(
        name=span.name,
        service=resource["service.name"],
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        error=span.status.code == ERROR,
        attributes=_values(span.attributes),
        events=[(event.name, _values(event.attributes)) for event in span.events],
        resource=resource,
        schema_url=schema_url,
        trace_state=span.trace_state,
    )


class _Servicer(pb_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        self._receiver.take(request, {key: str(value) for key, value in context.invocation_metadata()})
        return pb.ExportTraceServiceResponse()


@contextmanager
def grpc_receiver(address: str = "127.0.0.1:0") -> Iterator[Receiver]:
    """Serves OTLP over gRPC."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_TraceServiceServicer_to_server(_Servicer(receiver), server)
    port = server.add_insecure_port(address)
    server.start()
    receiver.endpoint = f"http://127.0.0.1:{port}"
    try:
        yield receiver
    finally:
        server.stop(0).wait()


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    """Serves OTLP over HTTP at /v1/traces."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status = 404
            if self.path == "/v1/traces":
                receiver.take(pb.ExportTraceServiceRequest.FromString(body), dict(self.headers))
                status = 200
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    receiver.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
