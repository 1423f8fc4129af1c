"""Asks a child whether it can serve: grpc.health.v1 for services, GET /ready for the gateway."""

from __future__ import annotations

import asyncio
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem import rpc

POLL_S = 0.05


async def http_status(url: str, path: str, limit_s: float = 2.0) -> int:
    """Status of a GET. Raises OSError or TimeoutError if nobody answers."""
    parts = urllib.parse.urlsplit(url)
    async with asyncio.timeout(limit_s):
        # Whose certificate it is does not matter here: the launcher asks its own child on this machine.
        context = ssl._create_unverified_context() if parts.scheme == "https" else None
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=context)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n".encode())
            line = await reader.readline()
        finally:
            writer.close()
    words = line.split()
    if len(words) < 2 or not words[1].isdigit():
        raise OSError(f"{url} does not speak HTTP")
    return int(words[1])


class Probe:
    """Readiness of one address. For a gateway `alive` asks whether it answers, not whether engines are there."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None

    async def alive(self) -> bool:
        """True if the service at the address answers and says that it serves."""
        if self._address.startswith(("http://", "https://")):
            return await self._http("/health")
        if self._channel is None:
            self._channel = rpc.channel(self._address)
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.aio.AioRpcError as error:
            # An answer of any kind, such as UNAUTHENTICATED, is a server that runs.
            return error.code() == grpc.StatusCode.UNAUTHENTICATED
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def ready(self) -> bool:
        """As alive; of a gateway, that an engine can serve."""
        if self._address.startswith(("http://", "https://")):
            return await self._http("/ready")
        return await self.alive()

    async def _http(self, path: str) -> bool:
        try:
            return await http_status(self._address, path) == 200
        except (OSError, TimeoutError):
            return False

    async def until(self, ask: Callable[[], Awaitable[bool]], every_s: float = POLL_S) -> None:
        """Returns once `ask` (self.alive or self.ready) says yes. Polling: what is asked lives in another process."""
        while not await ask():  # noqa: ASYNC110
            await asyncio.sleep(every_s)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
