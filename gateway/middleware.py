"""What happens around every request: id, key, rates, errors in the right dialect, one log line, metrics."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.body import ClientGone
from gateway.context import SCOPE_KEY, Gateway, RequestContext
from gateway.errors import ApiError, internal
from gateway.tracing import begin, finish

log = logging.getLogger("gateway.request")

_SLASHES = re.compile(r"/{2,}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/openapi.json"})
# The live page's files hold no data; what it polls would fill the log.
_PAGE_FILES = "/web/"
_POLLED = "/tandem/"
CLIENT_CLOSED = 499


def is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def _is_quiet(path: str) -> bool:
    """Neither logged, unless it fails, nor traced."""
    return path in _OPEN_PATHS or path.startswith((_PAGE_FILES, _POLLED))


def secret_of(headers: Headers) -> str | None:
    """The API key that a request shows: a bearer token, or Anthropic's x-api-key."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key")


class RequestMiddleware:
    """See the module."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Some clients put "/chat/completions" after a base URL that ends in a slash already.
        if "//" in scope["path"]:
            scope["path"] = _SLASHES.sub("/", scope["path"])
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        context = RequestContext(given if _REQUEST_ID.fullmatch(given) else "req_" + secrets.token_hex(12))
        scope[SCOPE_KEY] = context
        if self._gateway.tracer.on and not _is_quiet(scope["path"]):
            context.span = begin(self._gateway.tracer, scope, context)
        answer = _Answer(send, context)
        try:
            self._authorize(scope, headers, context)
            await self._app(scope, receive, answer.send)
        except ApiError as error:
            await self._fail(scope, answer, context, error)
        except ClientGone:
            context.client_gone = True
        except asyncio.CancelledError:
            context.failed = True
            raise
        except Exception:
            log.exception("request failed", extra={"request_id": context.id, "path": scope["path"][:200]})
            await self._fail(scope, answer, context, internal())
        finally:
            self._report(scope, context, CLIENT_CLOSED if context.client_gone else answer.status)

    def _authorize(self, scope: Scope, headers: Headers, context: RequestContext) -> None:
        path = scope["path"]
        if path in _OPEN_PATHS or path.startswith(_PAGE_FILES) or scope["method"] == "OPTIONS":
            return
        context.key = self._gateway.keys.find(secret_of(headers))
        if scope["method"] == "POST":
            context.response_headers.update(self._gateway.limiter.take(context.key, 1, 0))

    async def _fail(self, scope: Scope, answer: _Answer, context: RequestContext, error: ApiError) -> None:
        context.failed = True
        context.finish = error.code or "error"
        self._gateway.metrics.errors.labels(error.code or "error").inc()
        if answer.status:
            # Headers are out: nothing can be said any more but to close.
            return
        body = error.body(is_anthropic(scope["path"]))
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
        raw = [(key.encode("latin-1"), value.encode("latin-1", "replace")) for key, value in headers.items()]
        await answer.send({"type": "http.response.start", "status": error.status, "headers": raw})
        await answer.send({"type": "http.response.body", "body": body})

    def _report(self, scope: Scope, context: RequestContext, status: int) -> None:
        route: Any = scope.get("route")
        path = getattr(route, "path", "other")
        seconds = time.monotonic() - context.started
        metrics = self._gateway.metrics
        metrics.http.labels(path, str(status)).inc()
        metrics.http_seconds.labels(path).observe(seconds)
        if context.client_gone:
            metrics.disconnects.inc()
        if context.model:
            self._gateway.recent.finished(context, path, status, seconds)
        if context.span.recording:
            finish(context.span, context, getattr(route, "path", ""), status, scope["method"])
        context.span.end()
        if _is_quiet(path) and status in (200, 304, CLIENT_CLOSED):
            return
        entry: dict[str, object] = {
            "request_id": context.id,
            "method": scope["method"],
            "path": path,
            "status": status,
            "ms": round(seconds * 1000, 1),
        }
        if context.key is not None:
            entry["key"] = context.key.id
        if context.model:
            entry.update(
                model=context.model,
                prompt_tokens=context.prompt_tokens,
                cached_tokens=context.cached_tokens,
                completion_tokens=context.completion_tokens,
                ttft_ms=round(context.ttft_s * 1000, 1) if context.ttft_s is not None else None,
                engine=context.engine,
                attempts=context.attempts,
            )
        if context.finish:
            entry["reason"] = context.finish
        if context.span.trace_id:
            entry["trace_id"] = context.span.trace_id
        log.info("request", extra=entry)


class _Answer:
    """Watches what is sent, and adds the headers that every answer has."""

    __slots__ = ("_context", "_send", "status")

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=list(message["headers"]))
            headers["x-request-id"] = self._context.id
            for key, value in self._context.response_headers.items():
                headers.setdefault(key, value)
            message = {**message, "headers": headers.raw}
        await self._send(message)
