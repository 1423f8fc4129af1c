"""The FastAPI application: routes, errors in OpenAI's form, start and stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.client import RouterClient
from gateway.context import Gateway
from gateway.docs import openapi_of
from gateway.errors import INVALID, ApiError
from gateway.fleet import FleetClient
from gateway.keys import KeyRing
from gateway.limits import RateLimiter
from gateway.mcp import app as mcp
from gateway.metrics import Metrics
from gateway.middleware import RequestMiddleware, is_anthropic
from gateway.recent import Recent
from gateway.routes import ROUTERS, page
from gateway.settings import GatewaySettings
from tandem import __version__
from tandem.tracing import open_tracer

log = logging.getLogger("gateway")


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in the form of all other errors."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        message, code = f"Unknown request URL: {request.method} {path}.", "unknown_url"
    elif error.status_code == 405:
        message, code = f"Method {request.method} is not allowed for {path}.", "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    shown = ApiError(error.status_code, message, kind=INVALID, code=code)
    return Response(
        shown.body(is_anthropic(request.url.path)),
        status_code=error.status_code,
        headers=dict(error.headers or {}),
        media_type="application/json",
    )


def build_app(settings: GatewaySettings, rates_file: str = "") -> FastAPI:
    """The application of one gateway process.

    Args:
        settings: the gateway's settings.
        rates_file: file that holds the rate limits' buckets; shared by the workers of one gateway.

    Raises:
        SettingsError: traces are asked for and cannot be made.
    """
    client = RouterClient(settings)
    tracer = open_tracer(settings, "gateway")
    gateway = Gateway(
        settings,
        client,
        KeyRing(settings.keys_file),
        RateLimiter(rates_file),
        Metrics(),
        FleetClient(settings, client.metadata),
        Recent(settings.recent_requests),
        tracer,
    )
    tracer.watch(gateway.metrics.registry)

    tools = mcp.McpApp(gateway)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.client.start()
        await gateway.fleet.start()
        yield
        gateway.stopping = True
        await tools.close()
        await gateway.fleet.close()
        await gateway.client.close()
        gateway.limiter.close()
        await asyncio.to_thread(tracer.close)

    app = FastAPI(
        title="Tandem",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _http_error},
    )
    app.state.gateway = gateway
    for router in ROUTERS:
        app.include_router(router)
    if settings.page:
        app.include_router(page.router)
    if settings.mcp:
        app.router.routes.append(Route(mcp.PATH, tools, methods=list(mcp.METHODS), include_in_schema=False))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi(_: Request) -> Response:
        return Response(orjson.dumps(openapi_of(app)), media_type="application/json")

    app.add_middleware(RequestMiddleware, gateway=gateway)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.strip() for origin in settings.cors_origins.split(",")],
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
