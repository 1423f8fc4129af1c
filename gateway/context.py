"""What a request carries through the gateway, and what the gateway itself holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from tandem.tracing import NULL_SPAN, NULL_TRACER, Span, Tracer

if TYPE_CHECKING:
    from gateway.client import RouterClient
    from gateway.fleet import FleetClient
    from gateway.keys import ApiKey, KeyRing
    from gateway.limits import RateLimiter
    from gateway.metrics import Metrics
    from gateway.recent import Recent
    from gateway.settings import GatewaySettings

SCOPE_KEY = "tandem.context"


@dataclass(slots=True)
class RequestContext:
    """One HTTP request: who asks, since when, and what its log line will say."""

    id: str
    started: float = field(default_factory=time.monotonic)
    key: ApiKey | None = None
    model: str = ""
    engine: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    finish: str = ""
    attempts: int = 0
    client_gone: bool = False
    failed: bool = False
    receipts: list[dict[str, Any]] = field(default_factory=list)
    response_headers: dict[str, str] = field(default_factory=dict)
    span: Span = NULL_SPAN

    def first_token(self) -> None:
        if self.ttft_s is None:
            self.ttft_s = time.monotonic() - self.started


@dataclass(slots=True)
class Gateway:
    """All state of one gateway process."""

    settings: GatewaySettings
    client: RouterClient
    keys: KeyRing
    limiter: RateLimiter
    metrics: Metrics
    fleet: FleetClient
    recent: Recent
    tracer: Tracer = NULL_TRACER
    stopping: bool = False
    # One future per request that is being answered; a result ends the request with an error.
    _enders: set[asyncio.Future[None]] = field(default_factory=set)

    @contextmanager
    def ending(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done when the server ends what still runs."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._enders.add(future)
        try:
            yield future
        finally:
            self._enders.discard(future)

    def end_requests(self) -> None:
        """Ends all running requests: streams with an error event, plain ones with 503."""
        for future in self._enders:
            if not future.done():
                future.set_result(None)


def gateway_of(request: Request) -> Gateway:
    state: Any = request.app.state
    return state.gateway  # type: ignore[no-any-return]


def context_of(request: Request) -> RequestContext:
    return request.scope[SCOPE_KEY]  # type: ignore[no-any-return]
