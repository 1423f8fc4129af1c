"""Reading a request body: bounded in size and time, strict JSON, one pass."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from gateway.errors import ApiError, bad
from gateway.schemas.base import B, validate

# orjson stops at 1,024; what handles the values later (schemas, templates, encoders) is recursive and stops earlier.
MAX_DEPTH = 128


class ClientGone(Exception):
    """The client hung up; nobody is left to answer."""


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 over `limit` bytes, 408 when it takes longer than `timeout_s` seconds.
        ClientGone: the client hung up.
    """
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared[:20]) > limit:
        raise too_large(int(declared[:20]), limit)
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(request, limit)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {timeout_s:g} seconds.",
            code="request_timeout",
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ClientGone from None


async def _collect(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large(size, limit)
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def too_large(size: int, limit: int) -> ApiError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ApiError(
        413,
        f"The body has at least {size} bytes, but at most {limit} are allowed.",
        code="request_too_large",
        headers={"connection": "close"},
    )


def parse_json(raw: bytes) -> Any:
    """Strict JSON: no NaN, no Infinity, no lone surrogates, nesting bounded.

    Raises:
        ApiError: 400.
    """
    if not raw:
        raise bad("The body is empty; a JSON object is expected.", code="invalid_json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    # Counting bytes is far cheaper than walking, and settles it for almost every body.
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and deeper_than(value, MAX_DEPTH):
        raise bad(f"The body is nested more than {MAX_DEPTH} deep.", code="invalid_json")
    return value


def deeper_than(value: Any, limit: int) -> bool:
    """Whether containers are nested more than `limit` deep. Walks level by level, so it cannot overflow itself."""
    level = [value]
    for _ in range(limit):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


async def parse_body(request: Request, model: type[B], limit: int, timeout_s: float) -> B:
    """Reads, parses and validates in one go. Raises ApiError or ClientGone."""
    return validate(model, parse_json(await read_body(request, limit, timeout_s)))
