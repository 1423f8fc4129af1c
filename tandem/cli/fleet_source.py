"""Where `tandem status` and `tandem top` get the fleet from: a gateway over HTTP, or a router's admin address."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

from tandem.fleet_view import decision_dict, fleet_dict

KEY_VARIABLE = "TANDEM_API_KEY"
# The services' own variable: where they run, commands find it set.
TOKEN_VARIABLE = "TANDEM_SERVICE_TOKEN_FILE"
TIMEOUT_S = 5.0


class UnreachableError(Exception):
    """Nobody answers, or not with a fleet; the text says where and why."""


def service_metadata() -> tuple[tuple[str, str], ...]:
    """What an admin address beyond loopback asks for: the services' token, if its file is named in the environment.

    Raises:
        ValueError: the file cannot be read.
    """
    path = os.environ.get(TOKEN_VARIABLE, "")
    if not path:
        return ()
    try:
        return (("authorization", f"Bearer {Path(path).read_text().strip()}"),)
    except OSError as error:
        raise ValueError(f"{TOKEN_VARIABLE} is {path}, which cannot be read: {error.strerror}") from None


class Source(Protocol):
    """See the module."""

    name: str

    async def fleet(self) -> dict[str, Any]:
        """The fleet as tandem.fleet_view.fleet_dict has it. Raises UnreachableError."""

    async def routes(self, last: int) -> list[dict[str, Any]]:
        """The last decisions, oldest first. Raises UnreachableError."""

    async def close(self) -> None: ...


class AdminSource:
    """A router's admin address."""

    def __init__(self, address: str) -> None:
        """Raises ValueError for what is no address."""
        from tandem import rpc
        from tandem.router.v1 import router_pb2_grpc

        self.name = address
        self._metadata = service_metadata()
        self._channel = rpc.channel(address)
        self._stub = router_pb2_grpc.RouterAdminServiceStub(self._channel)

    def _failed(self, error: Any) -> UnreachableError:
        return UnreachableError(f"router at {self.name}: {error.code().name}: {error.details()}")

    async def fleet(self) -> dict[str, Any]:
        import grpc

        from tandem.router.v1 import router_pb2

        try:
            request = router_pb2.ListEnginesRequest()
            return fleet_dict(await self._stub.ListEngines(request, timeout=TIMEOUT_S, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from None

    async def routes(self, last: int) -> list[dict[str, Any]]:
        import grpc

        from tandem.router.v1 import router_pb2

        found = []
        try:
            request = router_pb2.WatchRoutesRequest(last=last)
            async for answer in self._stub.WatchRoutes(request, timeout=TIMEOUT_S, metadata=self._metadata):
                found += [decision_dict(decision) for decision in answer.decisions]
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from None
        return found

    async def close(self) -> None:
        await self._channel.close()


class GatewaySource:
    """A gateway's /tandem endpoints; the key comes from the environment."""

    def __init__(self, url: str) -> None:
        import httpx

        self.name = url.rstrip("/")
        key = os.environ.get(KEY_VARIABLE, "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(base_url=self.name, headers=headers, timeout=TIMEOUT_S)

    async def _get(self, path: str) -> dict[str, Any]:
        import httpx

        try:
            answer = await self._http.get(path)
            value = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnreachableError(f"gateway at {self.name}: {str(error) or type(error).__name__}") from None
        except ValueError:
            raise UnreachableError(f"gateway at {self.name} does not answer with JSON") from None
        if answer.status_code != 200:
            told = value.get("error") if isinstance(value, dict) else None
            message = told.get("message") if isinstance(told, dict) else f"HTTP {answer.status_code}"
            raise UnreachableError(f"gateway at {self.name}: {message}")
        return dict(value)

    async def fleet(self) -> dict[str, Any]:
        return await self._get("/tandem/fleet")

    async def routes(self, last: int) -> list[dict[str, Any]]:
        return list((await self._get(f"/tandem/routes?last={last}"))["data"])

    async def close(self) -> None:
        await self._http.aclose()
