"""What the live page shows, as JSON and as a stream: fleet, routing decisions, finished requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.body import parse_body
from gateway.chat_job import prepare_chat
from gateway.context import Gateway, RequestContext, context_of, gateway_of
from gateway.docs import describe
from gateway.errors import ApiError, bad
from gateway.fleet import MAX_LAST
from gateway.latency import latency
from gateway.schemas.chat import ChatBody
from gateway.sse import EventStream, named, until_gone

router = APIRouter()

FLEET_EVERY_S = 1.0
RETRY_S = 1.0
STOP_CHECK_S = 0.5
DEFAULT_LAST = 100
LAST = {"last": {"type": "integer", "minimum": 0, "maximum": MAX_LAST, "default": DEFAULT_LAST}}


def _last_of(request: Request) -> int:
    raw = request.query_params.get("last", str(DEFAULT_LAST))
    if not (raw.isascii() and raw.isdigit()) or int(raw[:9]) > MAX_LAST:
        raise bad(f"last is {raw[:40]!r}, but it must be a whole number from 0 to {MAX_LAST}.", "last")
    return int(raw)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json", headers={"cache-control": "no-store"})


def _key_of(context: RequestContext) -> str | None:
    return context.key.id if context.key else None


def _shown(decision: dict[str, Any], gateway: Gateway, key: str | None) -> dict[str, Any]:
    """A decision without the request's id if it is another key's."""
    if key is None or gateway.recent.holds(decision["request_id"], key):
        return decision
    return {**decision, "request_id": ""}


async def snapshot(gateway: Gateway) -> dict[str, Any]:
    """The fleet, with this gateway's latencies and clock. Raises ApiError if the router does not answer."""
    fleet = await gateway.fleet.fleet()
    return {"unix_ms": int(time.time() * 1000), **fleet, "latency": latency(gateway.metrics)}


@router.get("/tandem/fleet", **describe("The fleet now", ok="Fleet"))
async def fleet(request: Request) -> Response:
    return _json(await snapshot(gateway_of(request)))


@router.get(
    "/tandem/routes", **describe("The last routing decisions, oldest first", ok="Routes", errors=(400,), query=LAST)
)
async def routes(request: Request) -> Response:
    gateway, key = gateway_of(request), _key_of(context_of(request))
    decisions = await gateway.fleet.routes(_last_of(request))
    return _json({"data": [_shown(decision, gateway, key) for decision in decisions]})


@router.get(
    "/tandem/requests", **describe("The key's last requests, oldest first", ok="Requests", errors=(400,), query=LAST)
)
async def requests(request: Request) -> Response:
    gateway = gateway_of(request)
    return _json({"data": gateway.recent.last(_last_of(request), _key_of(context_of(request)))})


@router.post("/tandem/explain", **describe("Where a chat would go, and why", ChatBody, ok="Decision", errors=(404,)))
async def explain(request: Request) -> Response:
    gateway, context = gateway_of(request), context_of(request)
    settings = gateway.settings
    body = await parse_body(request, ChatBody, settings.max_body_bytes, settings.body_timeout)
    job = await prepare_chat(request, gateway, context, body)
    # Nothing is written, so this is no text request for the records.
    context.model = ""
    return _json(await until_gone(request, gateway.fleet.explain(job.generation.request)))


@router.get("/tandem/events", **describe("Fleet, decisions and requests as they come", ok="Fleet", stream=True))
async def events(request: Request) -> Response:
    gateway, context = gateway_of(request), context_of(request)
    return EventStream(_events(gateway, _key_of(context)), gateway, context)


async def _events(gateway: Gateway, key: str | None) -> AsyncIterator[bytes]:
    """Events `fleet` (every second), `route`, `request`, and `trouble` while the router does not answer.

    Ends when the gateway begins to stop: an open page must not use up the grace that running requests have.
    """
    out: asyncio.Queue[bytes] = asyncio.Queue(maxsize=256)
    finished = gateway.recent.follow()

    async def fleets() -> None:
        while True:
            try:
                await out.put(named("fleet", await snapshot(gateway)))
            except ApiError as error:
                await out.put(named("trouble", error.to_dict()["error"]))
            await asyncio.sleep(FLEET_EVERY_S)

    async def decisions() -> None:
        while True:
            # While the router is away the fleet's events tell so.
            with contextlib.suppress(ApiError):
                async for decision in gateway.fleet.watch(0):
                    await out.put(named("route", _shown(decision, gateway, key)))
            await asyncio.sleep(RETRY_S)

    async def entries() -> None:
        while True:
            entry = await finished.get()
            if key is None or entry["key"] == key:
                await out.put(named("request", entry))

    tasks = [asyncio.create_task(work()) for work in (fleets, decisions, entries)]
    try:
        while not gateway.stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_CHECK_S):
                    event = await out.get()
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gateway.recent.unfollow(finished)
