"""Where the engines are: a static list, DNS names with all their addresses, or both."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tandem.rpc import check_address

log = logging.getLogger("router.discovery")

Resolver = Callable[[str, int], Awaitable[list[str]]]


@dataclass(frozen=True)
class DnsName:
    """A name whose addresses are all engines."""

    host: str
    port: int


def parse_engines(text: str) -> tuple[list[str], list[DnsName]]:
    """Splits the `engines` setting into fixed addresses and DNS names.

    Raises:
        ValueError: an entry is neither host:port, unix:/path nor dns:name:port.
    """
    fixed: list[str] = []
    names: list[DnsName] = []
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            continue
        if entry.startswith("dns:"):
            host, colon, port = entry.removeprefix("dns:").removeprefix("//").rpartition(":")
            if not colon or not host or not port.isdigit() or not 0 < int(port) <= 65535:
                raise ValueError(f"{entry!r} is not dns:name:port")
            names.append(DnsName(host, int(port)))
        else:
            address = check_address(entry)
            if address not in fixed:
                fixed.append(address)
    return fixed, names


async def resolve_all(host: str, port: int) -> list[str]:
    """All addresses of a name as gRPC targets, sorted.

    Raises:
        OSError: the name does not resolve.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    targets = set()
    for family, _, _, _, address in found:
        ip = str(address[0])
        targets.add(f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}")
    return sorted(targets)


class Discovery:
    """Yields the set of addresses whenever it changes."""

    def __init__(self, engines: str, interval_s: float, resolver: Resolver = resolve_all) -> None:
        self._fixed, self._names = parse_engines(engines)
        self._interval_s = interval_s
        self._resolver = resolver
        self._known: dict[DnsName, list[str]] = {}

    async def addresses(self) -> set[str]:
        """The addresses now. A name that fails to resolve keeps those it had: DNS may be down while engines are up."""
        result = set(self._fixed)
        for name in self._names:
            try:
                self._known[name] = await self._resolver(name.host, name.port)
            except OSError as error:
                log.debug("name does not resolve", extra={"host": name.host, "error": str(error)})
            result.update(self._known.get(name, ()))
        return result

    async def run(self, changed: Callable[[set[str]], None]) -> None:
        """Calls `changed` at once and after every change, until cancelled."""
        last: set[str] | None = None
        while True:
            now = await self.addresses()
            if now != last:
                changed(now)
                last = now
            if not self._names:
                return
            await asyncio.sleep(self._interval_s)
