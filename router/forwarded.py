"""What of a stream has reached its client: kept as bytes, as long as memory lasts, so that it can be resumed."""

from __future__ import annotations

from router.metrics import RouterMetrics
from router.retry import KeptBytes
from tandem.inference.v1 import inference_pb2 as pb
from tandem.resume import BrokenStreamError, split_events


class Forwarded:
    """The forwarded messages of one request, over all its attempts."""

    def __init__(self, memory: KeptBytes, metrics: RouterMetrics) -> None:
        self._memory = memory
        self._metrics = metrics
        self._size = 0
        self._last = b""
        self.chunks: list[bytes] = []
        # False once the memory for all streams was used up: this one can no longer be resumed.
        self.complete = True

    def add(self, data: bytes) -> None:
        """Keeps what goes to the client."""
        self._last = data
        if not self.complete:
            return
        if self._memory.take(len(data)):
            self._size += len(data)
            self.chunks.append(data)
        else:
            self.complete = False
            self.forget()
            self._metrics.unresumable.inc()

    def forget(self) -> None:
        """Gives the memory back; `usage` still works."""
        self.chunks.clear()
        self._memory.give(self._size)
        self._size = 0

    def usage(self) -> pb.Usage:
        """The usage that ended the stream; empty if it did not come that far."""
        try:
            for kind, start, end in reversed(split_events(self._last)):
                if kind == "usage":
                    return pb.GenerateResponse.FromString(self._last[start:end]).events[0].usage
        except BrokenStreamError:
            pass
        return pb.Usage()
