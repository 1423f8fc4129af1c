"""How a service that forwards tokens spares itself when it gets busy: it waits a little between a stream's messages."""

from __future__ import annotations

import asyncio
import gc
import time


class Pace:
    """How long a stream waits between two writes: nothing while the process has little to do, `max_s` when it is busy.

    `tick` is called regularly; it compares the process's CPU time with the wall clock.
    """

    # Shares of one core. Tokens that leave 20 ms later are not noticed; a second token's worth of CPU is.
    IDLE = 0.05
    FULL = 0.25

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._wall = time.monotonic()
        self._cpu = time.process_time()
        self._busy = 0.0
        self.seconds = 0.0

    def tick(self) -> None:
        wall, cpu = time.monotonic(), time.process_time()
        if wall - self._wall < 0.01:
            return
        busy = (cpu - self._cpu) / (wall - self._wall)
        self._wall, self._cpu = wall, cpu
        self._busy += 0.5 * (busy - self._busy)
        share = (self._busy - self.IDLE) / (self.FULL - self.IDLE)
        self.seconds = self._max_s * min(1.0, max(0.0, share))

    async def run(self) -> None:
        """Calls `tick` for ever."""
        while True:
            self.tick()
            await asyncio.sleep(0.1)


def freeze_heap() -> None:
    """Spares what a service has loaded from every later garbage collection, which stops its event loop for as long."""
    gc.collect()
    gc.freeze()
