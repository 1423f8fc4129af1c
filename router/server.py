"""A running router: its listeners, fleet and life cycle."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os

import grpc

from router.admin import SERVICE as ADMIN_SERVICE
from router.admin import AdminServicer
from router.discovery import Resolver, resolve_all
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.service import SERVICE, InferenceServicer
from router.settings import RouterSettings
from tandem import rpc
from tandem.metrics import MetricsServer
from tandem.router.v1 import router_pb2_grpc
from tandem.tracing import open_tracer

log = logging.getLogger("router")

# Time for error events to reach the clients at the end.
GOODBYE_S = 2.0


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RouterServer:
    """Starts and stops one router. `address` and `admin_address` tell the ports that were bound."""

    def __init__(
        self, settings: RouterSettings, token: str = "", resolver: Resolver = resolve_all, reuse_port: bool = False
    ) -> None:
        """Raises SettingsError if traces are asked for and cannot be made."""
        self.settings = settings
        self.metrics = RouterMetrics()
        self.tracer = open_tracer(settings, "router")
        self.tracer.watch(self.metrics.registry)
        self.fleet = Fleet(settings, token, resolver)
        self.inference = InferenceServicer(
            self.fleet,
            settings,
            self.metrics,
            token,
            trusted=bool(token) or is_local(settings.listen),
            tracer=self.tracer,
        )
        extra = (("grpc.so_reuseport", 1),) if reuse_port else ()
        self._server, self._health = rpc.server(extra)
        # Who can reach a socket or loopback port of this machine may steer its router; others show the token.
        guard = "" if not settings.admin_listen or is_local(settings.admin_listen) else token
        self._admin, self._admin_health = rpc.server(token=guard)
        self.address = settings.listen
        self.admin_address = settings.admin_listen
        self._http: MetricsServer | None = None

    async def start(self) -> None:
        """Binds and serves. Engines are found in the background.

        Raises:
            OSError: an address cannot be bound.
        """
        self._server.add_generic_rpc_handlers((self.inference.handlers(),))
        rpc.add_reflection(self._server, SERVICE)
        self.address = _bind(self._server, self.settings.listen)
        if self.settings.admin_listen:
            router_pb2_grpc.add_RouterAdminServiceServicer_to_server(AdminServicer(self.inference), self._admin)
            rpc.add_reflection(self._admin, ADMIN_SERVICE)
            self.admin_address = _bind(self._admin, self.settings.admin_listen)
            await self._admin_health.set(True)
            await self._admin_health.set(True, ADMIN_SERVICE)
            await self._admin.start()
        if self.settings.metrics_port:
            self._http = MetricsServer(
                self.metrics.registry, f"{self.settings.metrics_host}:{self.settings.metrics_port}"
            )
        self.fleet.start()
        await self._health.set(True)
        await self._health.set(True, SERVICE)
        await self._server.start()
        _private(self.settings.listen)
        _private(self.settings.admin_listen)
        log.info("router listens", extra={"address": self.address, "admin": self.admin_address})

    async def stop(self, grace_s: float) -> None:
        """Takes nothing new, lets live streams finish for `grace_s` seconds, then ends them with an error."""
        self.inference.draining = True
        self.inference.many.close()
        await self._health.set(False)
        await self._health.set(False, SERVICE)
        # Tells connected clients at once, so that their next calls go to another router; what runs has its time.
        closing = asyncio.create_task(self._server.stop(grace_s + GOODBYE_S))
        if self.inference.live and grace_s > 0:
            await asyncio.wait(self.inference.live, timeout=grace_s)
        for task in tuple(self.inference.live):
            task.cancel()
        if self.inference.live:
            await asyncio.wait(self.inference.live, timeout=GOODBYE_S)
        await self._server.stop(0.2)
        await closing
        await self._admin.stop(0)
        await self.fleet.close()
        self.inference.recorder.close()
        await asyncio.to_thread(self.tracer.close)
        if self._http is not None:
            self._http.close()


def _bind(server: grpc.aio.Server, address: str) -> str:
    """Binds; returns the address with the real port."""
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    if address.startswith("unix:"):
        return address
    return f"{address.rpartition(':')[0]}:{port}"


def _private(address: str) -> None:
    if address.startswith("unix:"):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(address.removeprefix("unix:"), 0o600)
