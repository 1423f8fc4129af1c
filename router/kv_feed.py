"""Applies one engine's numbered KV events to the prefix index, and notices when they cannot be trusted."""

from __future__ import annotations

import enum

from router.index import PrefixIndex, split_hashes
from tandem.block_hash import SCHEME
from tandem.engine.v1 import engine_pb2 as pb


class Verdict(enum.Enum):
    """What to do after a message."""

    APPLIED = "applied"
    # Old epoch or a duplicate: nothing was done.
    IGNORED = "ignored"
    # Something is missing: subscribe anew and ask for a snapshot.
    RESUBSCRIBE = "resubscribe"


class KvFeed:
    """State of one engine's event stream. `slot` is the engine's bit in the index; it changes with every snapshot."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.slot = index.new_slot()
        self.epoch = 0
        self.number = 0
        self.live = False
        self.scheme_error = ""
        self._loading: int | None = None

    def close(self) -> None:
        """Forgets everything."""
        self._index.retire(self.slot)
        if self._loading is not None:
            self._index.retire(self._loading)
            self._loading = None
        self.live = False

    def reset(self) -> None:
        """The engine restarted or events were missed: what was known is void."""
        self.close()
        self.slot = self._index.new_slot()
        self.epoch = self.number = 0

    def indexed(self) -> int:
        """Blocks of this engine in the index."""
        return self._index.count(self.slot)

    def resume_point(self) -> tuple[int, int]:
        """(epoch, last number) for a new subscription; (0, 0) asks for a snapshot."""
        return (self.epoch, self.number) if self.live else (0, 0)

    def interrupted(self) -> None:
        """The stream broke. What is known stays in use until the next snapshot or continuation."""
        if self._loading is not None:
            self._index.retire(self._loading)
            self._loading = None

    def apply(self, message: pb.SubscribeKvEventsResponse, current_epoch: int = 0) -> Verdict:
        """Takes one message of the stream.

        Args:
            current_epoch: the engine's epoch by its load reports, 0 if unknown; messages of another one are void.

        Raises:
            ValueError: hashes are malformed.
        """
        if current_epoch and message.epoch != current_epoch:
            return Verdict.IGNORED
        if message.HasField("snapshot"):
            return self._snapshot(message)
        if not self.live or message.epoch != self.epoch:
            return Verdict.RESUBSCRIBE
        return self._events(message)

    def _snapshot(self, message: pb.SubscribeKvEventsResponse) -> Verdict:
        snapshot = message.snapshot
        if snapshot.scheme != SCHEME:
            self.scheme_error = f"unknown block hash scheme {snapshot.scheme!r}; this router knows {SCHEME!r}"
            return Verdict.IGNORED
        hashes = split_hashes(snapshot.hashes)
        if self._loading is None:
            self._loading = self._index.new_slot()
        self._index.stored(self._loading, hashes)
        if snapshot.complete:
            self._index.retire(self.slot)
            self.slot, self._loading = self._loading, None
            self.epoch, self.number, self.live = message.epoch, message.number, True
            self._apply_all(list(message.events))
        return Verdict.APPLIED

    def _events(self, message: pb.SubscribeKvEventsResponse) -> Verdict:
        events = list(message.events)
        first = message.number - len(events) + 1
        if message.number <= self.number:
            return Verdict.IGNORED
        if first > self.number + 1:
            self.reset()
            return Verdict.RESUBSCRIBE
        self._apply_all(events[self.number + 1 - first :])
        self.number = message.number
        return Verdict.APPLIED

    def _apply_all(self, events: list[pb.KvEvent]) -> None:
        index, slot = self._index, self.slot
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "stored":
                index.stored(slot, split_hashes(event.stored.hashes))
            elif kind == "removed":
                index.removed(slot, split_hashes(event.removed.hashes))
            elif kind == "cleared":
                index.retire(slot)
                slot = self.slot = index.new_slot()
