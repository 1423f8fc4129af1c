"""One engine on its event loop: binds, loads, serves, drains, stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine_service.control import EngineServicer
from engine_service.service import Host, InferenceServicer
from engine_service.settings import EngineSettings
from tandem import rpc, traffic
from tandem.engine.v1 import engine_pb2, engine_pb2_grpc
from tandem.inference.v1 import inference_pb2, inference_pb2_grpc
from tandem.tracing import open_tracer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from engine_service.engine import Engine
    from tandem.metrics import MetricsServer

log = logging.getLogger(__name__)

_SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name,
)
# Health of the process by itself, for whoever restarts what is ill: a hung step is an illness, draining is none.
LIVE = "live"
_HEALTH_EVERY_S = 0.25


def _load_engine(settings: EngineSettings) -> Engine:
    # Here, so that the server answers before torch is imported.
    from engine_service.load import load_engine

    return load_engine(settings)


class Process:
    """One engine process on its event loop."""

    def __init__(self, settings: EngineSettings, load: Callable[[EngineSettings], Engine] = _load_engine) -> None:
        """Raises SettingsError if traces are asked for and cannot be made."""
        self._settings = settings
        self._load = load
        self.host = Host()
        self.server, self.health = rpc.server()
        self.tracer = open_tracer(settings, "engine")
        self.inference = InferenceServicer(self.host, self.tracer)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.inference, self.server)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(EngineServicer(self.host, settings), self.server)
        rpc.add_reflection(self.server, *_SERVICES)
        self.port = 0
        # True once a thread was left running in native code: the interpreter must not try to finalize under it.
        self.left_behind = False
        self._tasks: list[asyncio.Task[None]] = []
        self._registry: CollectorRegistry | None = None
        self.metrics: MetricsServer | None = None

    async def start(self) -> None:
        """Binds and serves at once; health says NOT_SERVING until the model is there.

        Raises:
            OSError: the address cannot be bound, or the traffic's directory not be used. ValueError: it is none.
        """
        target = rpc.check_address(self._settings.listen)
        if self._settings.traffic_log:
            # Now rather than when the model is there.
            traffic.prepare(Path(self._settings.traffic_log))
        if self._settings.metrics_listen:
            from tandem.metrics import MetricsServer, new_registry

            self._registry = new_registry(gpu=True)
            self.tracer.watch(self._registry)
            self.metrics = MetricsServer(self._registry, self._settings.metrics_listen)
        await self._set_health(False)
        await self.health.set(True, LIVE)
        try:
            self.port = self.server.add_insecure_port(target)
        except RuntimeError as error:
            raise OSError(f"--listen {self._settings.listen} cannot be bound") from error
        if target.startswith("unix:"):
            os.chmod(target.removeprefix("unix:"), 0o600)
        elif target.rpartition(":")[0] not in ("127.0.0.1", "localhost", "[::1]"):
            log.warning("listening on %s without authentication: anyone who reaches it may use it", target)
        await self.server.start()

    async def load(self) -> Engine:
        """Loads the model beside the server and starts to work."""
        events = asyncio.get_running_loop()
        loaded: asyncio.Future[Engine] = events.create_future()

        def report(engine: Engine | None, error: BaseException | None) -> None:
            if loaded.cancelled():
                return
            if error is not None or engine is None:
                loaded.set_exception(error or RuntimeError("nothing was loaded"))
            else:
                loaded.set_result(engine)

        def work() -> None:
            engine, failure = None, None
            try:
                engine = self._load(self._settings)
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the event loop is gone: nobody waits any more
                events.call_soon_threadsafe(report, engine, failure)

        self.left_behind = True
        # A daemon: a signal during loading must not wait for it.
        threading.Thread(target=work, name="load", daemon=True).start()
        try:
            engine = await loaded
        except Exception:
            self.left_behind = False
            raise
        self.left_behind = False
        if self._registry is not None:
            from engine_service.metrics import EngineMetrics

            engine.metrics = EngineMetrics(engine, self._registry)
        engine.start()
        self.host.engine = engine
        self._tasks.append(asyncio.create_task(self._watch(engine)))
        await self._set_health(True)
        return engine

    async def _set_health(self, serving: bool) -> None:
        for name in ("", *_SERVICES):
            await self.health.set(serving, name)

    async def _watch(self, engine: Engine) -> None:
        """Health follows the engine's state: at once when a step hangs or recovers, soon when it drains."""
        changed = asyncio.Event()
        watchdog = asyncio.create_task(engine.watch(changed, changed))
        shown = engine.state
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), _HEALTH_EVERY_S)
                changed.clear()
                if engine.state != shown:
                    shown = engine.state
                    await self._set_health(shown == engine_pb2.ENGINE_STATE_READY)
                    await self.health.set(shown != engine_pb2.ENGINE_STATE_STUCK, LIVE)
        finally:
            watchdog.cancel()

    async def drain(self, grace: float) -> None:
        """Lets what runs finish within `grace` seconds."""
        if self.host.engine is not None:
            left = self.host.engine.drain()
            log.info("draining", extra={"requests": left, "grace_s": grace})
            await self._set_health(False)
            await self.host.engine.drained(grace)

    async def stop(self) -> None:
        """Ends everything within seconds."""
        for task in self._tasks:
            task.cancel()
        engine = self.host.engine
        try:
            if engine is not None:
                self.left_behind = not await engine.close()
        except Exception:
            log.exception("the engine did not close cleanly")
        self.inference.many.close()
        # A moment for the last statuses to reach their readers.
        await self.server.stop(1.0)
        await asyncio.to_thread(self.tracer.close)
        if self.metrics is not None:
            self.metrics.close()
