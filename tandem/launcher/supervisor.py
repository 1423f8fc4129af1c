"""Runs all children of a plan until told to stop, and leaves nothing running."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

from tandem.launcher.child import GUARD, Child, ChildFailed, State
from tandem.launcher.plan import Plan
from tandem.launcher.ready import Probe
from tandem.launcher.watchdog import Watchdog

log = logging.getLogger(__name__)

# Seconds that each group may take to end after SIGINT, in the order of a request's way: together under 10.
STOP_S = {"gateway": 4.0, "router": 2.0, "engine": 2.0, "draft": 0.5}
# Added per group after SIGTERM, when running requests may finish first.
DRAIN_EXTRA_S = 5.0


def emit_to_stderr(data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()


class Supervisor:
    """Owns the children. `run` is the launcher's main loop."""

    def __init__(
        self,
        plan: Plan,
        watchdog: Watchdog,
        ready_timeout_s: float,
        grace_s: float = 30.0,
        emit: Callable[[bytes], None] = emit_to_stderr,
        command: tuple[str, ...] = GUARD,
    ) -> None:
        self.plan = plan
        self.children = [Child(spec, plan.environment, watchdog, emit, command) for spec in plan.children]
        self._ready_timeout_s = ready_timeout_s
        self._grace_s = grace_s
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self, on_ready: Callable[[Sequence[Child]], Awaitable[None]]) -> int:
        """Starts everything, calls `on_ready` once, and returns the exit code after everything has ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        tasks = {asyncio.create_task(child.run()): child for child in self.children}
        start = asyncio.create_task(self._start(on_ready))
        asked = asyncio.create_task(self._signals.get())
        code, number = 0, signal.SIGINT
        waiting: set[asyncio.Task[None] | asyncio.Task[signal.Signals]] = {*tasks, start, asked}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                failed = next((task.exception() for task in done if task is not asked and task.exception()), None)
                if failed is not None:
                    if not isinstance(failed, (ChildFailed, TimeoutError)):
                        raise failed
                    log.error("%s", failed)
                    code = 1
                    break
                if asked in done:
                    number = asked.result()
                    break
                if all(child.state is State.GIVEN_UP for child in self.children):
                    log.error("every child has been given up")
                    code = 1
                    break
        finally:
            start.cancel()
            await self._stop(number, list(tasks))
        return code

    async def _start(self, on_ready: Callable[[Sequence[Child]], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                for child in self.children:
                    await child.once_ready.wait()
                await self._until_served()
        except TimeoutError:
            late = [child.spec.name for child in self.children if not child.once_ready.is_set()]
            what = ", ".join(late) or "the gateway (it reaches no engine)"
            raise TimeoutError(f"not ready after {self._ready_timeout_s:.0f} s: {what}") from None
        await on_ready(self.children)

    async def _until_served(self) -> None:
        """The gateway says ready only when a request could be answered."""
        probe = Probe(self.plan.url)
        await probe.until(probe.ready, every_s=0.2)

    async def _stop(self, number: signal.Signals, tasks: list[asyncio.Task[None]]) -> None:
        """Ends the groups in the order of a request's way, so that no live stream is taken for a lost engine."""
        drain = number == signal.SIGTERM
        # A child that has not been sent its signal yet must not be restarted meanwhile.
        impatient = asyncio.create_task(self._signals.get())
        for service, seconds in STOP_S.items():
            group = [child for child in self.children if child.spec.service == service]
            for child in group:
                child.begin_stop(signal.SIGTERM if drain else signal.SIGINT)
            limit = seconds + (self._grace_s + DRAIN_EXTRA_S if drain and service == "gateway" else 0.0)
            await self._gone(group, limit, impatient)
            for child in group:
                child.signal_group(signal.SIGKILL)
        impatient.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _gone(self, group: list[Child], limit_s: float, impatient: asyncio.Task[signal.Signals]) -> None:
        """Waits until no child of the group runs, the time is up, or a second signal comes."""
        deadline = asyncio.get_running_loop().time() + limit_s
        while any(child.running for child in group) and not impatient.done():
            if asyncio.get_running_loop().time() > deadline:
                names = ", ".join(child.spec.name for child in group if child.running)
                log.warning("not ended within %.1f s, so killed: %s", limit_s, names)
                return
            await asyncio.sleep(0.02)
