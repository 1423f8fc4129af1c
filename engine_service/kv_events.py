"""The numbered log of what the prefix cache holds, as routers subscribe to it. Lives on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from tandem.block_hash import SCHEME
from tandem.engine.v1 import engine_pb2
from tandem.lm.block_pool import KvChange

# Events kept for subscribers that come back; about 100 bytes each.
_KEPT = 65_536
# Hashes per snapshot message: 1 MiB.
_SNAPSHOT_HASHES = 65_536
# Events per message.
_BATCH = 4_096


def to_event(change: KvChange) -> engine_pb2.KvEvent:
    joined = b"".join(change.hashes)
    if change.kind == "stored":
        return engine_pb2.KvEvent(stored=engine_pb2.KvStored(hashes=joined, parent=change.parent))
    if change.kind == "removed":
        return engine_pb2.KvEvent(removed=engine_pb2.KvRemoved(hashes=joined))
    return engine_pb2.KvEvent(cleared=engine_pb2.KvCleared())


class KvEventLog:
    """Mirrors the pool's cache by its changes, so that snapshot and numbers agree without asking the step loop."""

    def __init__(self, epoch: int, block_size: int, model_digest: str) -> None:
        self._epoch = epoch
        self.block_size = block_size
        self._model_digest = model_digest
        self.hashes: dict[bytes, None] = {}
        self.number = 0
        self._recent: deque[KvChange] = deque(maxlen=_KEPT)
        self._wakers: set[asyncio.Event] = set()
        self._closed = False

    def cached_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a chain are cached now."""
        count = 0
        for digest in hashes:
            if digest not in self.hashes:
                break
            count += 1
        return count

    def apply(self, changes: Sequence[KvChange]) -> None:
        """Adds the pool's changes, in order."""
        if not changes:
            return
        for change in changes:
            if change.kind == "stored":
                self.hashes.update(dict.fromkeys(change.hashes))
            elif change.kind == "removed":
                for digest in change.hashes:
                    self.hashes.pop(digest, None)
            else:
                self.hashes.clear()
            self._recent.append(change)
            self.number = change.number
        self._wake()

    def close(self) -> None:
        """Ends all subscriptions."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        for waker in self._wakers:
            waker.set()

    async def subscribe(self, epoch: int, last_number: int) -> AsyncIterator[engine_pb2.SubscribeKvEventsResponse]:
        """Snapshot (unless events from `last_number` on are still held), then events as they come."""
        waker = asyncio.Event()
        self._wakers.add(waker)
        try:
            async for message in self._follow(epoch, last_number, waker):
                yield message
        finally:
            self._wakers.discard(waker)

    async def _follow(
        self, epoch: int, last_number: int, waker: asyncio.Event
    ) -> AsyncIterator[engine_pb2.SubscribeKvEventsResponse]:
        oldest = self._recent[0].number if self._recent else self.number + 1
        if epoch == self._epoch and oldest - 1 <= last_number <= self.number:
            sent = last_number
        else:
            sent = self.number
            for message in self._snapshot():
                yield message
        while not self._closed:
            oldest = self._recent[0].number if self._recent else self.number + 1
            if sent < oldest - 1:
                # The reader fell behind what is kept.
                sent = self.number
                for message in self._snapshot():
                    yield message
            start = len(self._recent) - (self.number - sent)
            batch = [self._recent[index] for index in range(start, min(start + _BATCH, len(self._recent)))]
            if batch:
                sent = batch[-1].number
                yield engine_pb2.SubscribeKvEventsResponse(
                    epoch=self._epoch, number=sent, events=[to_event(change) for change in batch]
                )
                continue
            waker.clear()
            await waker.wait()

    def _snapshot(self) -> list[engine_pb2.SubscribeKvEventsResponse]:
        hashes = list(self.hashes)
        chunks = [hashes[i : i + _SNAPSHOT_HASHES] for i in range(0, len(hashes), _SNAPSHOT_HASHES)] or [[]]
        return [
            engine_pb2.SubscribeKvEventsResponse(
                epoch=self._epoch,
                number=self.number,
                snapshot=engine_pb2.KvSnapshot(
                    scheme=SCHEME,
                    block_size=self.block_size,
                    model_digest=self._model_digest,
                    hashes=b"".join(chunk),
                    complete=index == len(chunks) - 1,
                ),
            )
            for index, chunk in enumerate(chunks)
        ]
