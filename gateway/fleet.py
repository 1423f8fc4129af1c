"""The gateway's side of RouterAdminService: the fleet, decisions as they are made, explanations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from gateway.client import open_channel
from gateway.errors import SERVER, ApiError, from_tandem
from gateway.settings import GatewaySettings
from tandem.errors import TandemError
from tandem.fleet_view import decision_dict, fleet_dict
from tandem.inference.v1 import inference_pb2 as pb
from tandem.router.v1 import router_pb2 as rpb
from tandem.router.v1 import router_pb2_grpc

CALL_TIMEOUT_S = 5.0
# Any number of open pages ask the router no more often than this.
FLEET_TTL_S = 0.4
MAX_LAST = 1000


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind=SERVER, code="router_admin_unavailable")


class FleetClient:
    """One channel to the router's admin listener. Raises ApiError for every failed call."""

    def __init__(self, settings: GatewaySettings, metadata: tuple[tuple[str, str], ...]) -> None:
        self._settings = settings
        self._metadata = metadata
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._lock = asyncio.Lock()
        self._fleet: dict[str, Any] = {}
        self._fleet_at = float("-inf")

    async def start(self) -> None:
        if self._settings.router_admin:
            self._channel = open_channel(self._settings, self._settings.router_admin)
            self._stub = router_pb2_grpc.RouterAdminServiceStub(self._channel)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _ready(self) -> Any:
        if self._stub is None:
            raise _unavailable("This gateway knows no admin address of its router (--router-admin).")
        return self._stub

    async def fleet(self) -> dict[str, Any]:
        """The fleet as the router sees it; may be 0.4 s old."""
        stub = self._ready()
        async with self._lock:
            if time.monotonic() - self._fleet_at > FLEET_TTL_S:
                answer = await self._call(stub.ListEngines, rpb.ListEnginesRequest())
                self._fleet, self._fleet_at = fleet_dict(answer), time.monotonic()
        return self._fleet

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._failed(error) from None

    def _failed(self, error: grpc.RpcError) -> ApiError:
        found = TandemError.from_rpc(error)
        if found.reason != "UNSPECIFIED":
            return from_tandem(found)
        # gRPC's own text may hold addresses and paths of the server, so it goes nowhere.
        return _unavailable("The router's admin address does not answer.")

    async def routes(self, last: int) -> list[dict[str, Any]]:
        """The last decisions, oldest first."""
        return [one async for one in self.watch(last, follow=False)]

    async def watch(self, last: int, follow: bool = True) -> AsyncIterator[dict[str, Any]]:
        """The last decisions, then those of requests that end from now on."""
        request = rpb.WatchRoutesRequest(last=last, follow=follow)
        call = self._ready().WatchRoutes(request, timeout=None if follow else CALL_TIMEOUT_S, metadata=self._metadata)
        try:
            async for answer in call:
                for decision in answer.decisions:
                    yield decision_dict(decision)
        except grpc.RpcError as error:
            raise self._failed(error) from None
        finally:
            call.cancel()

    async def explain(self, request: pb.GenerateRequest) -> dict[str, Any]:
        """What the router would do with a request, and why. Nothing is sent."""
        answer = await self._call(self._ready().ExplainRoute, rpb.ExplainRouteRequest(request=request))
        return decision_dict(answer.decision)
