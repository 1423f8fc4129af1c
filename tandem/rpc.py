"""gRPC plumbing that every service uses: addresses, channel and server options, health, reflection."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from hmac import compare_digest
from typing import Any

# gRPC reads this when it first starts. Its newer event engine hands every event to a pool of threads; with Python's
# aio API that costs a quarter more CPU per streamed message than the classic poller (measured with grpcio 1.85).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.errors import TandemError, abort

# Above every HTTP body limit, so that a legal HTTP request is never cut by gRPC.
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
KEEPALIVE_MS = 10_000
# Linux allows 107 characters and a final zero; macOS 103.
MAX_SOCKET_PATH = 103

_COMMON = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS = (
    *_COMMON,
    # Only the router retries, by its own rules.
    ("grpc.enable_retries", 0),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
)
SERVER_OPTIONS = (
    *_COMMON,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)


def check_address(address: str) -> str:
    """Returns a gRPC target for "host:port", "unix:/path" or "unix:///path". Raises ValueError with the reason."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:").removeprefix("//")
        if len(path.encode()) > MAX_SOCKET_PATH:
            raise ValueError(
                f"socket path of {len(path.encode())} bytes is over the limit of {MAX_SOCKET_PATH}: {path}"
            )
        return f"unix:{path}"
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"{address!r} is neither host:port nor unix:/path")
    return address


def check_http_address(address: str) -> str:
    """Returns "host:port", or "" (off). Raises ValueError: what scrapes metrics speaks TCP only."""
    if address and check_address(address).startswith("unix:"):
        raise ValueError(f"{address!r} is a Unix socket, but host:port is needed")
    return address


def channel(address: str, extra: Sequence[tuple[str, object]] = ()) -> grpc.aio.Channel:
    """An aio channel with Tandem's limits and keepalive."""
    return grpc.aio.insecure_channel(check_address(address), options=[*CHANNEL_OPTIONS, *extra])


class Health:
    """grpc.health.v1 of one server: overall ("") and per service name."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()

    async def set(self, serving: bool, service: str = "") -> None:
        status = health_pb2.HealthCheckResponse
        await self.servicer.set(service, status.SERVING if serving else status.NOT_SERVING)


class TokenGuard(grpc.aio.ServerInterceptor):
    """Lets only callers in who show the services' token. Health stays open: probes have no token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

        async def refuse(_request: object, context: grpc.aio.ServicerContext) -> None:
            await abort(context, TandemError("UNAUTHENTICATED", "the services' token is missing or wrong"))

        # For calls of every kind: the answer is a status alone.
        self._refuse: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization", "")
        shown = given if isinstance(given, bytes) else given.encode()
        if handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/"):
            return await continuation(handler_call_details)
        return await continuation(handler_call_details) if compare_digest(shown, self._expected) else self._refuse


def server(extra: Sequence[tuple[str, object]] = (), token: str = "") -> tuple[grpc.aio.Server, Health]:
    """An aio server with health; `extra` options win. Add servicers, then call `add_reflection`, bind and start.

    With a `token`, everything but health answers UNAUTHENTICATED to who does not show it.
    """
    guards = [TokenGuard(token)] if token else []
    result = grpc.aio.server(interceptors=guards, options=list({**dict(SERVER_OPTIONS), **dict(extra)}.items()))
    status = Health()
    health_pb2_grpc.add_HealthServicer_to_server(status.servicer, result)
    return result, status


def add_reflection(result: grpc.aio.Server, *services: str) -> None:
    """Turns on server reflection for these full service names (and health)."""
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, result)
