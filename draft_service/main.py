"""Runs the draft service: one process beside each engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from draft_service.build import build_proposer
from draft_service.service import DraftServicer
from draft_service.session import Limits
from draft_service.settings import DraftSettings
from tandem import logs, rpc
from tandem.draft.v1 import draft_pb2_grpc
from tandem.settings import SettingsError
from tandem.tracing import Tracer, open_tracer

if TYPE_CHECKING:
    from tandem.metrics import MetricsServer

log = logging.getLogger(__name__)

SERVICE_NAME = "tandem.draft.v1.DraftService"


def run(settings: DraftSettings) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code: 2 for unusable settings, 1 for an unusable address."""
    logs.setup("draft", settings.log_level)
    try:
        return asyncio.run(_serve(settings))
    except SettingsError as error:
        log.error("%s", error)
        return 2
    except OSError as error:
        log.error("cannot serve on %s: %s", settings.listen, error)
        return 1


async def _serve(settings: DraftSettings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    proposer = build_proposer(settings)
    # A model takes milliseconds: its own thread keeps health and info alive.
    executor = ThreadPoolExecutor(1, "propose") if "model" in settings.proposer_names else None
    epoch = secrets.randbits(64) or 1
    tracer = open_tracer(settings, "draft")
    servicer = DraftServicer(
        proposer,
        settings.proposer_names,
        epoch,
        Limits(settings.max_sequences, settings.max_sequence_tokens),
        vocab_size=max((getattr(part, "vocab_size", 0) for part in proposer.proposers), default=0),
        executor=executor,
        tracer=tracer,
    )
    server, health = rpc.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    rpc.add_reflection(server, SERVICE_NAME)
    bind(server, settings.listen)
    metrics = _serve_metrics(settings.metrics_listen, servicer, tracer) if settings.metrics_listen else None
    await server.start()
    await health.set(True)
    await health.set(True, SERVICE_NAME)
    # Millions of small objects live as long as their sequence: full collections would only add pauses.
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000)
    log.info("draft ready", extra={"listen": settings.listen, "proposers": settings.proposers, "pid": os.getpid()})
    await stop.wait()
    await health.set(False)
    await server.stop(grace=0.5)
    await asyncio.to_thread(tracer.close)
    if metrics is not None:
        metrics.close()
    try:
        proposer.close()
    except OSError as error:
        log.error("learnt outputs were not saved: %s", error)
    if settings.listen.startswith("unix:"):
        _socket_path(settings.listen).unlink(missing_ok=True)
    return 0


def _serve_metrics(address: str, servicer: DraftServicer, tracer: Tracer) -> MetricsServer:
    from draft_service.metrics import DraftCollector
    from tandem.metrics import MetricsServer, new_registry

    registry = new_registry()
    registry.register(DraftCollector(lambda: servicer.counters))
    tracer.watch(registry)
    return MetricsServer(registry, address)


def _socket_path(address: str) -> Path:
    return Path(rpc.check_address(address).removeprefix("unix:"))


def bind(server: object, address: str) -> None:
    """Binds; a socket file is private to the user, and one left by a dead process is replaced.

    Raises:
        OSError: the address is taken or cannot be bound.
    """
    target = rpc.check_address(address)
    if not target.startswith("unix:"):
        _add_port(server, target)
        return
    path = _socket_path(address)
    if path.exists():
        _remove_dead(path)
    before = os.umask(0o177)
    try:
        _add_port(server, target)
    finally:
        os.umask(before)
    with contextlib.suppress(OSError):
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)


def _add_port(server: object, target: str) -> None:
    try:
        port = server.add_insecure_port(target)  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise OSError(str(error)) from error
    if not port:
        raise OSError("address is taken or not allowed")


def _remove_dead(path: Path) -> None:
    import socket

    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise OSError(f"another process serves on {path}")
