"""/mcp: the protocol's SDK is loaded with the first request, because it takes a second and most gateways get none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from gateway.context import Gateway
from gateway.errors import ApiError, shutting_down

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

PATH = "/mcp"
STOP_CHECK_S = 0.5
METHODS = ("GET", "POST", "DELETE")


class McpApp:
    """ASGI application of streamable HTTP. Stateless: any worker or gateway can answer any request."""

    path = PATH

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._lock = asyncio.Lock()
        self._manager: StreamableHTTPSessionManager | None = None
        self._running: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Log line and metrics name a request's route by its path.
        scope["route"] = self
        self._check_origin(Headers(scope=scope))
        manager = await self._started()
        started = finished = False

        async def watched(message: Message) -> None:
            nonlocal started, finished
            started = True
            finished = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        call = asyncio.ensure_future(manager.handle_request(scope, receive, watched))
        # A server that stops ends what still runs, as everywhere else; a GET only listens and ends at once.
        idle = scope["method"] == "GET"
        with self._gateway.ending() as ending:
            while not call.done() and not ending.done() and not (idle and self._gateway.stopping):
                await asyncio.wait({call, ending}, timeout=STOP_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            if not started:
                raise shutting_down()
            if not finished:
                await send({"type": "http.response.body", "body": b""})
            return
        await call

    def _check_origin(self, headers: Headers) -> None:
        """A browser's page of another site may not use the tools, also not under a name that it made point here."""
        origin = headers.get("origin")
        if origin is None:
            return
        allowed = [one.strip() for one in self._gateway.settings.cors_origins.split(",")]
        if urlsplit(origin).netloc != headers.get("host") and origin not in allowed and "*" not in allowed:
            raise ApiError(403, f"Origin {origin[:200]!r} may not call this server.", code="origin_not_allowed")

    async def _started(self) -> StreamableHTTPSessionManager:
        async with self._lock:
            if self._manager is None:
                manager: StreamableHTTPSessionManager = await asyncio.to_thread(self._load)
                ready = asyncio.Event()
                self._running = asyncio.create_task(self._run(manager, ready))
                await ready.wait()
                self._manager = manager
            return self._manager

    def _load(self) -> Any:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        from gateway.mcp.tools import build_server

        return StreamableHTTPSessionManager(
            build_server(self._gateway), stateless=True, max_request_body_size=self._gateway.settings.max_body_bytes
        )

    async def _run(self, manager: StreamableHTTPSessionManager, ready: asyncio.Event) -> None:
        async with manager.run():
            ready.set()
            await self._stop.wait()

    async def close(self) -> None:
        self._stop.set()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
