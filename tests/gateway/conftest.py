"""A gateway on a real socket in front of the mock router, in threads of their own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gateway.app import build_app
from gateway.main import bind, server_class, uvicorn_config
from gateway.settings import GatewaySettings
from tests.gateway import mock_router


class LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@dataclass
class Stand:
    """A running gateway, its mock router, and a client."""

    url: str
    router: mock_router.MockRouter
    http: httpx.Client
    settings: GatewaySettings
    app: Any
    stop: Any = None

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        if "content" in more:
            return self.http.post(path, **more)
        return self.http.post(path, json=body, **more)


class RunningGateway:
    """uvicorn in a thread, as main.serve runs it."""

    def __init__(self, **settings: Any) -> None:
        self.settings = GatewaySettings(host="127.0.0.1", port=0, **settings)
        self.sock = bind(self.settings)
        self.app = build_app(self.settings)
        self.server = server_class()(uvicorn_config(self.settings, self.app), self.app.state.gateway)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until = time.monotonic() + 20
        while not self.server.started:
            if time.monotonic() > until or not self._thread.is_alive():
                raise RuntimeError("the gateway did not start")
            time.sleep(0.01)
        scheme = "https" if self.settings.tls_cert else "http"
        self.url = f"{scheme}://127.0.0.1:{self.sock.getsockname()[1]}"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
            runner.run(self.server.serve(sockets=[self.sock]))

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(15)


@pytest.fixture(scope="session")
def router_loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture(scope="session")
def mock(router_loop: LoopThread) -> Iterator[tuple[mock_router.MockRouter, int]]:
    server, servicer, port = router_loop.run(mock_router.start())
    yield servicer, port
    router_loop.run(server.stop(0))


@pytest.fixture(scope="session")
def shared_stand(mock: tuple[mock_router.MockRouter, int]) -> Iterator[Stand]:
    servicer, port = mock
    gateway = RunningGateway(router=f"127.0.0.1:{port}", max_body_bytes=4 * 1024 * 1024)
    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as http:
        yield Stand(gateway.url, servicer, http, gateway.settings, gateway.app)
    gateway.stop()


@pytest.fixture
def stand(shared_stand: Stand) -> Iterator[Stand]:
    router = shared_stand.router
    router.requests.clear()
    router.cancelled.clear()
    router.embeds.clear()
    router.token_delay = 0.0
    router.served = True
    yield shared_stand
    router.most_tokens = mock_router.MAX_MODEL_LEN
    router.token_delay = 0.0
    router.served = True


@pytest.fixture
def make_stand(mock: tuple[mock_router.MockRouter, int]) -> Iterator[Any]:
    """Gateways with settings of their own."""
    started: list[tuple[RunningGateway, httpx.Client]] = []
    servicer, port = mock

    def make(**settings: Any) -> Stand:
        settings.setdefault("router", f"127.0.0.1:{port}")
        client_options = settings.pop("client_options", {})
        gateway = RunningGateway(**settings)
        http = httpx.Client(base_url=gateway.url, timeout=60, trust_env=False, **client_options)
        started.append((gateway, http))
        servicer.requests.clear()
        servicer.cancelled.clear()
        return Stand(gateway.url, servicer, http, gateway.settings, gateway.app, gateway.stop)

    yield make
    for gateway, http in started:
        http.close()
        gateway.stop()
