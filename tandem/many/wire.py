"""What both sides of GenerateMany agree on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tandem.inference.v1 import inference_pb2 as pb

SERVICE = "tandem.inference.v1.InferenceService"
GENERATE = f"/{SERVICE}/Generate"
GENERATE_MANY = f"/{SERVICE}/GenerateMany"

# Bytes of data that a call may send before its reader has read any; in the contract.
WINDOW_BYTES = 65_536
# From this size on a message ends, and the next frame goes into the next one.
FULL_MESSAGE_BYTES = 1024 * 1024
# A larger request gets a call of its own, so that it holds nobody else up.
MAX_START_BYTES = 1024 * 1024

MetadataPairs = tuple[tuple[str, str | bytes], ...]


def to_wire(pairs: Iterable[tuple[str, str | bytes]]) -> list[pb.CallMetadata]:
    return [pb.CallMetadata(key=k, value=v.encode() if isinstance(v, str) else v) for k, v in pairs]


def from_wire(entries: Iterable[pb.CallMetadata]) -> MetadataPairs:
    return tuple((e.key, e.value if e.key.endswith("-bin") else e.value.decode(errors="replace")) for e in entries)


class Bell:
    """Wakes the one writer of a stream: at once for what is urgent, else not before a pause since its last write."""

    def __init__(self, pause: Callable[[], float]) -> None:
        """pause: seconds between two writes at the moment."""
        self._pause = pause
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._next_at = 0.0

    def ring(self, urgent: bool) -> None:
        if urgent or not self._next_at:
            self._rung.set()
        elif self._timer is None and not self._rung.is_set():
            self._timer = self._loop.call_at(self._next_at, self._rung.set)

    def written(self) -> None:
        """A message has just left: the pause begins."""
        pause = self._pause()
        self._next_at = self._loop.time() + pause if pause else 0.0

    async def wait(self) -> None:
        await self._rung.wait()
        self._rung.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
