"""Server-sent events: a response that ends when the client does, keeps quiet streams alive, and tells errors inside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.body import ClientGone
from gateway.context import RequestContext
from gateway.errors import ApiError, internal

log = logging.getLogger("gateway.sse")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
T = TypeVar("T")


def data(value: Any) -> bytes:
    """One event of the OpenAI form."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named(event: str, value: Any) -> bytes:
    """One event with a name."""
    return b"event: " + event.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"


def openai_error(error: ApiError) -> bytes:
    return data(error.to_dict())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client hangs up first.

    Raises:
        ClientGone: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, gone):
            if not one.done():
                one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Sends what `chunks` yields. An ApiError from it becomes an error event; the client's leaving closes it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        context: RequestContext,
        *,
        keep_alive_s: float,
        error_event: Callable[[ApiError], bytes] = openai_error,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._context = context
        self._keep_alive_s = keep_alive_s
        self._error_event = error_event
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        producer = asyncio.ensure_future(self._produce(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while not producer.done():
                await asyncio.wait({producer, gone}, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() and not producer.done():
                    self._context.client_gone = True
                    return
                if not producer.done() and time.monotonic() - self._last_sent >= self._keep_alive_s * 0.9:
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        finally:
            for one in (producer, gone):
                if not one.done():
                    one.cancel()
            await asyncio.gather(producer, gone, return_exceptions=True)

    async def _produce(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                if chunk:
                    self._last_sent = time.monotonic()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ApiError as error:
            self._context.failed = True
            self._context.finish = error.code or "error"
            await send({"type": "http.response.body", "body": self._error_event(error), "more_body": True})
        except Exception:
            self._context.failed = True
            self._context.finish = "internal_error"
            log.exception("stream failed", extra={"request_id": self._context.id})
            await send({"type": "http.response.body", "body": self._error_event(internal()), "more_body": True})
        finally:
            close = getattr(self._chunks, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
