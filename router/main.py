"""Starts a router and serves until told to stop."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from router.server import RouterServer, is_local
from router.settings import RouterSettings
from tandem import logs
from tandem.pace import freeze_heap
from tandem.settings import SettingsError

log = logging.getLogger("router")

SIGINT_GRACE_S = 1.0


def run(settings: RouterSettings) -> int:
    """Serves until SIGTERM (finishes live streams within the grace) or SIGINT (ends them). Returns an exit code."""
    logs.setup("router", settings.log_level)
    problem = _check(settings)
    if problem:
        log.error(problem)
        return 2
    if settings.workers > 1:
        return _run_workers(settings)
    return _run_one(settings, reuse_port=False)


def _check(settings: RouterSettings) -> str:
    """What makes these settings unusable; empty if nothing does."""
    if settings.workers > 1 and settings.listen.startswith("unix:"):
        return "--workers needs a TCP port in --listen: a Unix socket cannot be shared"
    if settings.workers > 1 and settings.listen.endswith(":0"):
        return "--workers needs a fixed port in --listen"
    if settings.service_token_file and not Path(settings.service_token_file).is_file():
        return f"--service-token-file {settings.service_token_file} is no file"
    for name in (settings.listen, settings.admin_listen):
        if name and not settings.service_token_file and not is_local(name):
            log.warning("listening beyond this machine without a service token", extra={"address": name})
    return ""


def _run_one(settings: RouterSettings, reuse_port: bool) -> int:
    try:
        token = Path(settings.service_token_file).read_text().strip() if settings.service_token_file else ""
        return _event_loop_runner()(_serve(settings, token, reuse_port))
    except OSError as error:
        log.error(str(error))
        return 1
    except SettingsError as error:
        log.error(str(error))
        return 2


def _event_loop_runner() -> Callable[[Coroutine[None, None, int]], int]:
    try:
        import uvloop
    except ImportError:  # no wheels for this platform
        return asyncio.run
    return uvloop.run


async def _serve(settings: RouterSettings, token: str, reuse_port: bool) -> int:
    server = RouterServer(settings, token=token, reuse_port=reuse_port)
    stopped: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.put_nowait, number)
    await server.start()
    freeze_heap()
    grace = settings.drain_grace_s if await stopped.get() == signal.SIGTERM else SIGINT_GRACE_S
    log.info("router stops", extra={"grace_s": grace})
    stopping = asyncio.create_task(server.stop(grace))
    again = asyncio.create_task(stopped.get())
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        # A second signal: at once.
        os._exit(1)
    again.cancel()
    return 0


def worker_settings(settings: RouterSettings, number: int) -> RouterSettings:
    """Settings of one of several workers: all share `listen`; admin and metrics ports count up."""
    update: dict[str, object] = {"workers": 1}
    if settings.admin_listen.startswith("unix:"):
        update["admin_listen"] = f"{settings.admin_listen}.{number}" if number else settings.admin_listen
    elif settings.admin_listen:
        host, _, port = settings.admin_listen.rpartition(":")
        update["admin_listen"] = f"{host}:{int(port) + number if int(port) else 0}"
    if settings.metrics_port:
        update["metrics_port"] = settings.metrics_port + number
    if settings.recorder_file and number:
        update["recorder_file"] = f"{settings.recorder_file}.{number}"
    return settings.model_copy(update=update)


def _worker(settings: RouterSettings) -> None:
    logs.setup("router", settings.log_level)
    sys.exit(_run_one(settings, reuse_port=True))


def _run_workers(settings: RouterSettings) -> int:
    """Each worker is a whole router in its own process; the kernel spreads connections over them."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_worker, args=(worker_settings(settings, number),), name=f"router-{number}")
        for number in range(settings.workers)
    ]
    for worker in workers:
        worker.start()

    told = False

    def pass_on(number: int, _frame: object) -> None:
        nonlocal told
        told = True
        for worker in workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    # One that ends unasked takes the others with it: whoever started us starts us anew.
    multiprocessing.connection.wait([worker.sentinel for worker in workers])
    if not told:
        pass_on(signal.SIGTERM, None)
    for worker in workers:
        worker.join()
    return max(abs(worker.exitcode or 0) for worker in workers)
