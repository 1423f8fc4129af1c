"""For operators: /health, /ready, /version, /metrics."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import gateway_of
from gateway.docs import describe
from gateway.errors import SERVER, ApiError
from gateway.metrics import CONTENT_TYPE
from tandem import __version__

router = APIRouter()


@router.get("/health", **describe("Is this gateway alive", ok="Status"))
async def health(request: Request) -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.get("/ready", **describe("Can an engine serve", ok="Status"))
async def ready(request: Request) -> Response:
    gateway = gateway_of(request)
    models = [] if gateway.stopping else await gateway.client.models(fresh=True)
    if not models:
        why = "The gateway is shutting down." if gateway.stopping else "No engine is ready."
        raise ApiError(503, why, kind=SERVER, code="not_ready")
    names = [info.name for info in models]
    return Response(orjson.dumps({"status": "ready", "models": names}), media_type="application/json")


@router.get("/version", **describe("The server's version", ok="Version"))
async def version(request: Request) -> Response:
    return Response(orjson.dumps({"version": __version__}), media_type="application/json")


@router.get("/metrics", **describe("Prometheus metrics", ok=None))
async def metrics(request: Request) -> Response:
    return Response(gateway_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})
