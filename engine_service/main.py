"""The engine process: loads the model, serves, drains, ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

import psutil

from engine_service.control import EngineServicer
from engine_service.service import Host, InferenceServicer
from engine_service.settings import EngineSettings
from tandem import logs, rpc
from tandem.engine.v1 import engine_pb2, engine_pb2_grpc
from tandem.inference.v1 import inference_pb2, inference_pb2_grpc
from tandem.settings import SettingsError
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
# The step thread wants the GIL back soon after native code; the default of 5 ms would show in each decode step.
_SWITCH_INTERVAL_S = 0.0005


def load_engine(settings: EngineSettings) -> Engine:
    """Loads model, tokenizer and runner (blocking, minutes for a large model)."""
    from engine_service.engine import Engine
    from engine_service.speculation import NullSpeculation, SpeculationController
    from tandem.lm.runner import load_runner
    from tandem.lm.runner_settings import RunnerSettings
    from tandem.models.store import resolve
    from tandem.tokenizer import Tokenizer, load_bundle

    model = resolve(settings.model)
    tokenizer = Tokenizer(load_bundle(model.path))
    runner = load_runner(
        RunnerSettings(
            model_path=model.path,
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            numerics=settings.numerics,
            threads=settings.threads,
            device=_device(settings.device),
            block_size=settings.block_size,
            kv_cache_bytes=settings.kv_cache_bytes,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            tensor_parallel_size=settings.tensor_parallel_size,
            kernels=settings.kernels,
            model_impl=settings.model_impl,
            trust_remote_code=settings.trust_remote_code,
        )
    )
    speculation: SpeculationController = NullSpeculation()
    if settings.draft:
        from engine_service.speculation.controller import connect

        speculation = connect(settings, runner.spec.vocab_size)
    names = tuple(name.strip() for name in settings.served_model_name.split(",") if name.strip()) or (model.name,)
    return Engine(settings, runner, tokenizer, speculation, names)


def _device(name: str) -> str:
    """What "auto" means here: the first NVIDIA or AMD GPU that torch can use, else the CPU."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class Process:
    """One engine process on its event loop."""

    def __init__(self, settings: EngineSettings, load: Callable[[EngineSettings], Engine] = load_engine) -> None:
        """Raises SettingsError if traces are asked for and cannot be made."""
        self._settings = settings
        self._load = load
        self.host = Host()
        self.server, self.health = rpc.server()
        self.tracer = open_tracer(settings, "engine")
        inference = InferenceServicer(self.host, self.tracer)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(inference, self.server)
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
            OSError: the address cannot be bound. ValueError: it is none.
        """
        target = rpc.check_address(self._settings.listen)
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
        # A moment for the last statuses to reach their readers.
        await self.server.stop(1.0)
        await asyncio.to_thread(self.tracer.close)
        if self.metrics is not None:
            self.metrics.close()


async def _serve(process: Process, settings: EngineSettings) -> int:
    events = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        events.add_signal_handler(number, signals.put_nowait, number)
    try:
        await process.start()
    except (OSError, ValueError) as error:
        log.error("%s", error)
        return 2
    first = asyncio.create_task(signals.get())
    loading = asyncio.create_task(process.load())
    await asyncio.wait((first, loading), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        await process.stop()
        return 0
    failure = loading.exception()
    if failure is not None:
        log.error("the model cannot be loaded: %s", failure, exc_info=failure if _unexpected(failure) else None)
        await process.stop()
        return 1
    _log_ready(loading.result())
    number = await first
    if number == signal.SIGTERM:
        again = asyncio.create_task(signals.get())
        draining = asyncio.create_task(process.drain(settings.grace))
        await asyncio.wait((again, draining), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        again.cancel()
    stopping = asyncio.create_task(process.stop())
    again = asyncio.create_task(signals.get())
    await asyncio.wait((again, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        os._exit(130)
    return 0


def _unexpected(error: BaseException) -> bool:
    """Errors of settings and files, and those of our own code, speak for themselves; others need a traceback."""
    ours = type(error).__module__.partition(".")[0] in ("tandem", "kernels")
    return not ours and not isinstance(error, (ValueError, OSError, NotImplementedError))


def _event_loop_runner() -> Callable[[Coroutine[None, None, int]], int]:
    try:
        import uvloop
    except ImportError:  # no wheels for this platform
        return asyncio.run
    return uvloop.run


def _log_ready(engine: Engine) -> None:
    spec, settings = engine.runner.spec, engine.settings
    log.info(
        "engine is ready",
        extra={
            "listen": settings.listen,
            "model": ", ".join(engine.names),
            "architecture": spec.architecture,
            "numerics_id": spec.numerics_id,
            "batch_invariant": spec.batch_invariant,
            "kernel_path": spec.kernel_path,
            "threads": spec.threads,
            "weight_bytes": spec.weight_bytes,
            "kv_bytes": spec.num_blocks * spec.block_bytes,
            "workspace_bytes": spec.workspace_bytes,
            "base_bytes": spec.base_bytes,
            "rss_bytes": psutil.Process().memory_info().rss,
            "kv_blocks": spec.num_blocks,
            "block_size": spec.block_size,
            "max_model_len": engine.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "draft": settings.draft or "none",
        },
    )


def run(settings: EngineSettings) -> int:
    """Serves until a signal. Returns the process's exit code: 0, 1 (the model cannot be loaded), 2 (cannot listen)."""
    logs.setup("engine", settings.log_level)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    process: Process | None = None

    async def serve() -> int:
        nonlocal process
        process = Process(settings)
        return await _serve(process, settings)

    try:
        code = _event_loop_runner()(serve())
    except SettingsError as error:
        log.error("%s", error)
        return 2
    if process is not None and process.left_behind:
        # Native code that returns to a finalizing interpreter aborts the process or hangs it.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


__all__ = ["Process", "load_engine", "run"]
