"""Starts a gateway: one process, or several workers on one socket."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from gateway.settings import GatewaySettings
from tandem import logs
from tandem.pace import freeze_heap

if TYPE_CHECKING:
    from gateway.context import Gateway

log = logging.getLogger("gateway")

_RESTARTS_PER_MINUTE = 5
_ONE_PRESS_S = 0.5


def bind(settings: GatewaySettings) -> socket.socket:
    """The listening socket. Raises OSError with the address in its text."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    sock.set_inheritable(True)
    return sock


def uvicorn_config(settings: GatewaySettings, app: Any) -> Any:
    """uvicorn as we run it: uvloop and httptools where they are, our own logging, TLS if asked for."""
    import ssl

    import uvicorn

    loop = "auto" if sys.platform == "win32" else "uvloop"
    tls: dict[str, Any] = {}
    if settings.tls_cert:
        tls = {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key or None}
        if settings.tls_client_ca:
            tls.update(ssl_ca_certs=settings.tls_client_ca, ssl_cert_reqs=ssl.CERT_REQUIRED)
    return uvicorn.Config(
        app,
        loop=loop,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        timeout_keep_alive=75,
        # Requests are ended by GatewayServer; this is for connections that do not end even then.
        timeout_graceful_shutdown=max(1, int(settings.grace) + 5),
        **tls,
    )


def serve(settings: GatewaySettings, sock: socket.socket, rates_file: str = "") -> int:
    """Serves on the socket until SIGTERM or SIGINT. Returns an exit code."""
    from gateway.app import build_app
    from gateway.keys import KeyFileError
    from gateway.sse import DirectSend

    logs.setup("gateway", settings.log_level)
    try:
        app = build_app(settings, rates_file)
    except (KeyFileError, OSError, ValueError) as error:
        log.error("%s", error)
        return 2

    server = server_class()(uvicorn_config(settings, DirectSend(app)), app.state.gateway)
    # uvicorn raises the signal that stopped it once more, for whoever handled it before; nobody here needs that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    freeze_heap()
    host, port = sock.getsockname()[:2]
    log.info("gateway listens", extra={"address": f"{host}:{port}", "router": settings.router})
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[sock]))
    return 0 if server.started else 1


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handles a signal that has had its effect."""


def server_class() -> Any:
    """uvicorn's server, ending what runs as we promise. Imported late, so that this module stays light."""
    import uvicorn

    class GatewayServer(uvicorn.Server):
        """SIGTERM lets requests finish for the grace, SIGINT ends them with an error, a second one drops them."""

        def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
            super().__init__(config)
            self._gateway = gateway
            self._grace = gateway.settings.grace
            self._asked_at = 0.0

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            # A terminal sends Ctrl-C to workers too, and so does their parent: that is one, not two.
            if sig == signal.SIGINT and now - self._asked_at < _ONE_PRESS_S:
                return
            self._asked_at = now
            self._gateway.stopping = True
            if sig == signal.SIGINT:
                self._grace = 0.0
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            loop = asyncio.get_running_loop()
            end = loop.time() + self._grace
            ender = loop.create_task(self._end_requests(end))
            try:
                await super().shutdown(sockets)
            finally:
                ender.cancel()

        async def _end_requests(self, end: float) -> None:
            # In small steps, because a SIGINT during the grace shortens it, and a request may only just have begun.
            loop = asyncio.get_running_loop()
            while True:
                if loop.time() >= end or self._grace == 0.0:
                    self._gateway.end_requests()
                await asyncio.sleep(0.1)

    return GatewayServer


def _warn_if_open(settings: GatewaySettings) -> None:
    if settings.host not in ("127.0.0.1", "::1", "localhost") and not settings.keys_file:
        log.warning(
            "anyone who reaches this address may use the models: no keys file is set", extra={"host": settings.host}
        )


def run(settings: GatewaySettings) -> int:
    """Starts, serves until SIGTERM or SIGINT, returns an exit code."""
    logs.setup("gateway", settings.log_level)
    _warn_if_open(settings)
    try:
        sock = bind(settings)
    except OSError as error:
        log.error("%s", error.strerror)
        return 1
    if settings.workers == 1:
        return serve(settings, sock)
    return _run_workers(settings, sock)


def _run_workers(settings: GatewaySettings, sock: socket.socket) -> int:
    """Parent of the workers: starts them, replaces one that dies, stops them all."""
    folder = tempfile.mkdtemp(prefix="tandem-gateway-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    rates = os.path.join(folder, "rates")
    context = multiprocessing.get_context("spawn")
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    signal.signal(signal.SIGINT, lambda number, _: stopping.append(number))

    def start() -> Any:
        process = context.Process(target=_worker, args=(settings, sock, rates, os.getpid()), daemon=False)
        process.start()
        return process

    workers = [start() for _ in range(settings.workers)]
    deaths: list[float] = []
    code = 0
    try:
        while not stopping:
            time.sleep(0.2)
            for index, worker in enumerate(workers):
                if worker.is_alive():
                    continue
                deaths = [at for at in deaths if time.monotonic() - at < 60] + [time.monotonic()]
                log.error("a worker died", extra={"exit_code": worker.exitcode})
                if len(deaths) > _RESTARTS_PER_MINUTE or worker.exitcode == 2:
                    return worker.exitcode or 1
                workers[index] = start()
    finally:
        for worker in workers:
            if worker.is_alive() and worker.pid:
                os.kill(worker.pid, stopping[0] if stopping else signal.SIGTERM)
        for worker in workers:
            worker.join(settings.grace + 5)
            if worker.is_alive():
                worker.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _worker(settings: GatewaySettings, sock: socket.socket, rates: str, parent: int) -> None:
    from tandem.settings import Settings  # noqa: F401  (the spawned process needs the package importable)

    _die_with(parent)
    raise SystemExit(serve(settings, sock, rates))


def _die_with(parent: int) -> None:
    """Ends this worker when its parent is killed."""
    import threading

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
