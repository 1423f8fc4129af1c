"""One child process: starting, watching, restarting with backoff, stopping its whole process group."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable

from tandem.launcher.plan import ChildSpec
from tandem.launcher.ready import Probe
from tandem.launcher.watchdog import Watchdog

log = logging.getLogger(__name__)

# What a child is started with; the launcher's pid and the arguments of `tandem` follow.
GUARD = (sys.executable, "-m", "tandem.launcher.guard")
CRASHES_ALLOWED = 5
CRASH_WINDOW_S = 60.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
TAIL_BYTES = 8192


class State(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting to restart"
    GIVEN_UP = "given up"
    STOPPED = "stopped"


class ChildFailed(Exception):
    """A child ended before it was ever ready. The message has its last lines."""


class Backoff:
    """How long to wait after a crash. Pure: `crashed(now)` returns seconds, or None once it is enough."""

    def __init__(self, allowed: int = CRASHES_ALLOWED, window_s: float = CRASH_WINDOW_S) -> None:
        self._allowed = allowed
        self._window_s = window_s
        self._crashes: deque[float] = deque()

    def crashed(self, now: float) -> float | None:
        self._crashes.append(now)
        while now - self._crashes[0] > self._window_s:
            self._crashes.popleft()
        if len(self._crashes) >= self._allowed:
            return None
        return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 4.0 ** (len(self._crashes) - 1))


class Child:
    """Keeps one service running. `run` returns when the child is stopped or given up."""

    def __init__(
        self,
        spec: ChildSpec,
        environment: dict[str, str],
        watchdog: Watchdog,
        emit: Callable[[bytes], None],
        command: tuple[str, ...] = GUARD,
    ) -> None:
        self.spec = spec
        self.state = State.STARTING
        self.pid = 0
        self.restarts = 0
        self.ready_after_s: float | None = None
        self.once_ready = asyncio.Event()
        self._environment = environment
        self._watchdog = watchdog
        self._emit = emit
        self._command = command
        self._backoff = Backoff()
        self._stopping = False
        self._stop_waiting = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._tail = b""

    def last_lines(self, count: int = 12) -> str:
        """What the child said last, for people: of a JSON log line, its level and message."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return "\n".join(_readable(line) for line in lines[-count:])

    async def run(self) -> None:
        """Runs and restarts the child. Raises ChildFailed if it ends before it was ever ready."""
        while not self._stopping:
            code = await self._run_once()
            if self._stopping:
                break
            if not self.once_ready.is_set():
                self.state = State.STOPPED
                text = self.last_lines() or "(it printed nothing)"
                raise ChildFailed(f"{self.spec.name} ended with {_exit_text(code)} before it was ready:\n{text}")
            wait = self._backoff.crashed(time.monotonic())
            if wait is None:
                self.state = State.GIVEN_UP
                log.error(
                    "%s crashed %d times within %.0f s and is given up; its last lines:\n%s",
                    *(self.spec.name, CRASHES_ALLOWED, CRASH_WINDOW_S, self.last_lines()),
                )
                return
            self.state = State.WAITING
            log.warning("%s ended with %s; restarting in %.1f s", self.spec.name, _exit_text(code), wait)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_waiting.wait(), wait)
            self.restarts += 1
        self.state = State.STOPPED

    async def _run_once(self) -> int:
        """One life of the process: returns its exit code once it and its group are gone."""
        self.state, self._tail = State.STARTING, b""
        started = time.monotonic()
        environment = {**self._environment, "TANDEM_LOG_NAME": self.spec.name}
        process = await asyncio.create_subprocess_exec(
            *self._command,
            str(os.getpid()),
            *self.spec.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            process_group=0,
        )
        self._process, self.pid = process, process.pid
        self._watchdog.add(process.pid)
        if self._stopping:
            self.signal_group(signal.SIGTERM)
        forward = asyncio.create_task(self._forward(process))
        probe = asyncio.create_task(self._await_ready(started))
        try:
            code = await process.wait()
        finally:
            probe.cancel()
            self.signal_group(signal.SIGKILL)
            self._watchdog.drop(process.pid)
            self._process = None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(forward, 2.0)
        return code

    async def _await_ready(self, started: float) -> None:
        probe = Probe(self.spec.address)
        try:
            await probe.until(probe.alive)
        finally:
            await probe.close()
        self.state = State.READY
        if self.ready_after_s is None:
            self.ready_after_s = time.monotonic() - started
        else:
            log.info("%s is back", self.spec.name, extra={"after_s": round(time.monotonic() - started, 2)})
        self.once_ready.set()

    async def _forward(self, process: asyncio.subprocess.Process) -> None:
        """Passes whole lines on and keeps the last ones for an error message."""
        assert process.stdout is not None
        held = b""
        while chunk := await process.stdout.read(65536):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            held += chunk
            whole, newline, held = held.rpartition(b"\n")
            if newline:
                self._emit(whole + newline)
            elif len(held) > 65536:
                self._emit(held)
                held = b""
        if held:
            self._emit(held + b"\n")

    def signal_group(self, number: signal.Signals) -> None:
        """Sends a signal to the child and all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def begin_stop(self, number: signal.Signals) -> None:
        """No restart from now on. Only the child gets the signal: it knows best how to end what it started."""
        self._stopping = True
        self._stop_waiting.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    @property
    def running(self) -> bool:
        return self._process is not None


def _readable(line: str) -> str:
    try:
        entry = json.loads(line)
        text = f"{entry['level']}: {entry['message']}"
    except (ValueError, KeyError, TypeError):
        return line
    trace = str(entry.get("exception") or "").strip().splitlines()
    return f"{text} ({trace[-1]})" if trace and trace[-1].partition(": ")[2] not in text else text


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
