"""Server-sent events: a response that ends when the client does, keeps quiet streams alive, and tells errors inside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.body import ClientGone
from gateway.context import Gateway, RequestContext, gateway_of
from gateway.errors import ApiError, internal, shutting_down

log = logging.getLogger("gateway.sse")

DONE = b"data: [DONE]\n\n"
# In a scope: the server's own `send`.
DIRECT_SEND = "tandem.send"
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


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancels what still runs and waits until it is over."""
    for task in tasks:
        if not task.done():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client hangs up or the server ends first.

    Raises:
        ClientGone: the client hung up.
        ApiError: the server is shutting down.
    """
    task: asyncio.Future[Any] = asyncio.ensure_future(work)
    gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request.receive))
    with gateway_of(request).ending() as ending:
        try:
            await asyncio.wait({task, gone, ending}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return cast(T, task.result())
            if ending.done():
                raise shutting_down()
            raise ClientGone
        finally:
            await _cancelled(task, gone)


class EventStream(Response):
    """Sends what `chunks` yields. An ApiError from it becomes an error event; the client's leaving closes it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        gateway: Gateway,
        context: RequestContext,
        *,
        error_event: Callable[[ApiError], bytes] = openai_error,
        opening: Awaitable[None] | None = None,
        closed: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            opening: awaited before the first chunk.
            closed: called once, however the stream ends.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._gateway = gateway
        self._context = context
        self._keep_alive_s = gateway.settings.header_delay
        self._error_event = error_event
        self._opening = opening
        self._closed = closed
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # Once headers are out, what stands between us and the server has nothing more to do; each layer costs.
            await self._stream(receive, scope.get(DIRECT_SEND, send))
        finally:
            self._closed()

    async def _stream(self, receive: Receive, send: Send) -> None:
        producer = asyncio.ensure_future(self._produce(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        with self._gateway.ending() as ending:
            try:
                cut = await self._watch(send, producer, gone, ending)
            finally:
                await _cancelled(producer, gone)
        if cut:
            await self._fail(send, shutting_down())
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(
        self, send: Send, producer: asyncio.Future[None], gone: asyncio.Future[None], ending: asyncio.Future[None]
    ) -> bool:
        """Until the stream, the client or the server ends (then True); a quiet stream gets comments meanwhile."""
        while not producer.done():
            await asyncio.wait(
                {producer, gone, ending}, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED
            )
            if producer.done():
                break
            if gone.done():
                self._context.client_gone = True
                break
            if ending.done():
                return True
            if time.monotonic() - self._last_sent >= self._keep_alive_s * 0.9:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        return False

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._context.failed = True
        self._context.finish = error.code or "error"
        self._gateway.metrics.errors.labels(self._context.finish).inc()
        await send({"type": "http.response.body", "body": self._error_event(error), "more_body": True})

    async def _produce(self, send: Send) -> None:
        try:
            if self._opening is not None:
                await self._opening
            async for chunk in self._chunks:
                if chunk:
                    self._last_sent = time.monotonic()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ApiError as error:
            await self._fail(send, error)
        except Exception:
            log.exception("stream failed", extra={"request_id": self._context.id})
            await self._fail(send, internal())
        finally:
            close = getattr(self._chunks, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class DirectSend:
    """Outermost: leaves the server's own `send` in the scope, for streams."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT_SEND] = send
        await self._app(scope, receive, send)
