"""The HTTP request's span, in the terms of OpenTelemetry's conventions for HTTP servers and generative AI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from starlette.types import Scope

from tandem.inference.v1 import inference_pb2 as pb
from tandem.tracing import Span, Tracer, Value, names

if TYPE_CHECKING:
    from gateway.context import RequestContext
    from gateway.schemas.sampling import SamplingBody

# gen_ai.operation.name by route; /mcp does several, and tells by its own.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT"})
# What the sampling fields are called.
_SAMPLING = {
    "temperature": names.REQUEST_TEMPERATURE,
    "top_p": names.REQUEST_TOP_P,
    "top_k": names.REQUEST_TOP_K,
    "frequency_penalty": names.REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": names.REQUEST_PRESENCE_PENALTY,
}
CLIENT_CLOSED = 499


def begin(tracer: Tracer, scope: Scope, context: RequestContext) -> Span:
    """Starts the span; its parent is in the headers. The route is not known yet."""

    def headers() -> Iterator[tuple[str, str | bytes]]:
        return ((name.decode("latin-1"), value) for name, value in scope["headers"])

    span = tracer.serve("HTTP", headers, context.started)
    if span.recording:
        span.set(
            {
                names.HTTP_METHOD: scope["method"] if scope["method"] in _METHODS else "_OTHER",
                names.URL_PATH: scope["path"],
                names.URL_SCHEME: scope["scheme"],
                names.REQUEST_ID: context.id,
            }
        )
    return span


def request_attributes(span: Span, body: SamplingBody, request: pb.GenerateRequest) -> None:
    """What is asked for: numbers and names, never text."""
    as_json = request.structured.WhichOneof("kind") in ("json_object", "json_schema")
    found: dict[str, Value] = {
        names.OPERATION: "chat" if hasattr(body, "messages") else "text_completion",
        names.REQUEST_MODEL: body.model or request.model,
        names.REQUEST_STREAM: bool(body.stream),
        names.OUTPUT_TYPE: "json" if as_json else "text",
    }
    if request.stop.HasField("max_tokens"):
        found[names.REQUEST_MAX_TOKENS] = request.stop.max_tokens
    # From the body: the message's are rounded to 32 bits.
    found.update({name: value for key, name in _SAMPLING.items() if (value := getattr(body, key)) is not None})
    if body.seed is not None:
        # Attributes are signed integers of 64 bits.
        found[names.REQUEST_SEED] = body.seed - (1 << 64) if body.seed >= 1 << 63 else body.seed
    if request.n > 1:
        found[names.REQUEST_CHOICES] = request.n
    span.set(found)


def finish(span: Span, context: RequestContext, route: str, status: int, method: str) -> None:
    """Adds what is known at the end; route: "" if none matched. A 4xx is the client's error: the status stays unset."""
    found: dict[str, Value] = {names.HTTP_STATUS: status}
    if route:
        found[names.HTTP_ROUTE] = route
    if route in _OPERATIONS:
        found[names.OPERATION] = _OPERATIONS[route]
    if context.key is not None:
        found["tandem.key_id"] = context.key.id
    if context.model:
        found[names.PROVIDER_NAME] = names.PROVIDER
        found[names.RESPONSE_MODEL] = context.model
        found[names.INPUT_TOKENS] = context.prompt_tokens
        found[names.OUTPUT_TOKENS] = context.completion_tokens
        found[names.CACHED_TOKENS] = context.cached_tokens
    if context.engine:
        found[names.ENGINE] = context.engine
    if context.ttft_s is not None:
        found[names.FIRST_CHUNK_S] = context.ttft_s
    span.set(found)
    # Few names, whatever clients send: they are what backends group by.
    span.rename(f"{method if method in _METHODS else 'HTTP'} {route}".rstrip())
    if context.client_gone:
        span.fail("client_closed", ours=False)
    elif context.failed or status >= 400:
        # Once headers are out, an error is an event in the stream and the status stays 200.
        span.fail(context.finish or str(status), ours=status >= 500 or status < 400)
