"""Traces of requests over all services: W3C trace context comes in, spans go out over OTLP in the background.

Off unless an endpoint is set. Then every tracer is NULL_TRACER and every span NULL_SPAN, whose methods do nothing, and
nothing of OpenTelemetry's SDK is loaded. Spans are handed on by argument, never through context variables, and never
hold text of prompts or outputs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tandem.settings import SettingsError, TracedSettings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

Value = str | bool | int | float | Sequence[str]
# Header or metadata entries: names in lower case.
Carrier = Callable[[], Iterable[tuple[str, str | bytes]] | None]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Span:
    """A span that is not there. What a recording one does, see tandem.tracing.otlp."""

    __slots__ = ()

    # Whether anybody will see it: attributes need not be made if not.
    recording: bool = False
    # Metadata that makes a called service's span a child of this one.
    headers: tuple[tuple[str, str], ...] = ()
    # 32 hex digits, for log lines; "" if nothing is recorded.
    trace_id: str = ""

    def rename(self, name: str) -> None:
        """Changes the name."""

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Adds attributes; later ones win."""

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        """Adds an event of now."""

    def fail(self, reason: str, ours: bool = True) -> None:
        """Notes the kind of error. `ours`: the service failed, so the status is an error; else its caller did."""

    def child(self, name: str, started: float | None = None, calls: bool = False) -> Span:
        """A part of this one. started: time.monotonic(), default now. calls: another service does the work."""
        return self

    def end(self, at: float | None = None) -> None:
        """Ends it, at a time.monotonic() or now, and queues it for export. Nothing may be added later."""


class Tracer:
    """A tracer that makes no spans."""

    on: bool = False

    def serve(self, name: str, carrier: Carrier, started: float | None = None) -> Span:
        """The span of a request that this service got. carrier: gives headers; it is not called when tracing is off."""
        return NULL_SPAN

    def watch(self, registry: CollectorRegistry) -> None:
        """Adds counters of exported and dropped spans to a service's metrics."""

    def close(self) -> None:
        """Sends what waits, within seconds; what is left is dropped. Blocks; a second call does nothing."""


NULL_SPAN = Span()
NULL_TRACER = Tracer()


def endpoint_of(settings: TracedSettings, env: Mapping[str, str]) -> str:
    """Where spans go, "" for nowhere: the setting, else OpenTelemetry's own variables."""
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    if settings.otlp_endpoint:
        return settings.otlp_endpoint
    if env.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() != "otlp":
        return ""
    return next((env[name] for name in _ENDPOINTS if env.get(name)), "")


def protocol_of(settings: TracedSettings, env: Mapping[str, str]) -> str:
    """grpc or http/protobuf. Raises SettingsError for a variable that names something else."""
    if settings.otlp_protocol:
        return settings.otlp_protocol
    name = next((name for name in _PROTOCOLS if env.get(name)), "")
    if name and env[name] not in ("grpc", "http/protobuf"):
        raise SettingsError(f"{name} is {env[name]!r}, but grpc and http/protobuf are what is spoken")
    return env[name] if name else "grpc"


def open_tracer(settings: TracedSettings, service: str, env: Mapping[str, str] | None = None) -> Tracer:
    """The tracer of one process; NULL_TRACER if no endpoint is set.

    `service` is the last part of service.name (tandem-<service>), which OTEL_SERVICE_NAME overrides.

    Raises:
        SettingsError: an endpoint is set, but the extra is not installed, or the endpoint or protocol is unusable.
    """
    env = os.environ if env is None else env
    if not endpoint_of(settings, env):
        return NULL_TRACER
    try:
        from tandem.tracing.otlp import OtlpTracer
    except ImportError as error:
        problem = f"OpenTelemetry is not installed ({error}): pip install 'tandem-llm[traces]'"
        if settings.otlp_endpoint:
            raise SettingsError(f"--otlp-endpoint is set, but {problem}") from error
        # Clusters set the standard variables for everybody, also for those who do not trace.
        log.warning("no traces: %s", problem)
        return NULL_TRACER
    return OtlpTracer(settings, service, protocol_of(settings, env), env)


__all__ = ["NULL_SPAN", "NULL_TRACER", "Carrier", "Span", "Tracer", "Value", "open_tracer"]
