"""The engine as a program: signals, exit codes, and what it says when it is ready."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

import psutil

from engine_service.process import Process
from engine_service.settings import EngineSettings
from tandem import logs
from tandem.settings import SettingsError

if TYPE_CHECKING:
    from engine_service.engine import Engine

log = logging.getLogger(__name__)

# The step thread wants the GIL back soon after native code; the default of 5 ms would show in each decode step.
SWITCH_INTERVAL_S = 0.0005


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
            "head": settings.head,
        },
    )


def run(settings: EngineSettings) -> int:
    """Serves until a signal. Returns the process's exit code: 0, 1 (the model cannot be loaded), 2 (cannot listen)."""
    logs.setup("engine", settings.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
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
