"""What a router believes about the load of one engine: its last report, plus what this router sent since."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tandem.engine.v1 import engine_pb2 as pb

# A report tells the state at its making; what was sent shortly before it arrived may be missing in it.
REPORT_DELAY_S = 0.03


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The part of a WatchLoadResponse that routing needs. Times in seconds, rates per second."""

    epoch: int = 0
    running: int = 0
    waiting: int = 0
    uncached_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    draft_acceptance: float = 0.0
    max_num_seqs: int = 0
    max_waiting: int = 0
    # Prompt tokens of all requests since the engine's start, computed or read from its cache.
    taken_tokens: int = 0

    @classmethod
    def of(cls, report: pb.WatchLoadResponse) -> LoadReport:
        """From the engine's message."""
        return cls(
            epoch=report.epoch,
            running=report.running,
            waiting=report.waiting,
            uncached_tokens=report.uncached_waiting_tokens,
            kv_blocks_used=report.kv_blocks_used,
            kv_blocks_total=report.kv_blocks_total,
            prefill_tokens_per_s=report.prefill_tokens_per_s,
            decode_step_s=report.decode_step_ms / 1000,
            draft_acceptance=report.draft_acceptance,
            max_num_seqs=report.max_num_seqs,
            max_waiting=report.max_waiting,
            taken_tokens=report.prefill_tokens + report.cached_tokens,
        )


@dataclass(slots=True, eq=False)
class Sent:
    """One request that this router has in flight at an engine."""

    at: float
    uncached_tokens: int
    blocks: int


@dataclass
class EngineLoad:
    """Load view of one engine. `slot` is its bit in the prefix index. All times are of one monotonic clock, seconds."""

    name: str
    slot: int = -1
    block_size: int = 16
    max_model_len: int = 0
    report: LoadReport = field(default_factory=LoadReport)
    reported_at: float = -1e9
    in_flight: int = 0
    full: bool = False
    # Whether the prefix index hears of this engine's blocks by events.
    events_live: bool = False
    # Prompt tokens of this router's requests that the engine had accepted at its last report, and of everybody's; both
    # only grow.
    own_tokens: int = 0
    all_tokens: int = 0
    # Prompt tokens to compute that this router has sent since the report.
    sent_tokens: int = 0
    _accepted_tokens: int = 0
    _unreported: deque[Sent] = field(default_factory=deque)
    _unreported_tokens: int = 0
    _unreported_blocks: int = 0

    def update(self, report: LoadReport, now: float) -> None:
        """Takes a new report; what it must already count is dropped from the own dispatches."""
        if report.epoch != self.report.epoch:
            self._unreported.clear()
            self._unreported_tokens = self._unreported_blocks = 0
        else:
            self.all_tokens += max(0, report.taken_tokens - self.report.taken_tokens)
            self.own_tokens += self._accepted_tokens
        self._accepted_tokens = 0
        self.report, self.reported_at, self.full = report, now, False
        while self._unreported and self._unreported[0].at <= now - REPORT_DELAY_S:
            self._forget(self._unreported.popleft())
        self.sent_tokens = self._unreported_tokens

    def _forget(self, sent: Sent) -> None:
        self._unreported_tokens -= sent.uncached_tokens
        self._unreported_blocks -= sent.blocks

    def sent(self, now: float, uncached_tokens: int, blocks: int) -> Sent:
        """Counts a dispatch of `uncached_tokens` to compute and `blocks` of KV to fill."""
        entry = Sent(now, uncached_tokens, blocks)
        self._unreported.append(entry)
        self._unreported_tokens += uncached_tokens
        self._unreported_blocks += blocks
        self.sent_tokens += uncached_tokens
        self.in_flight += 1
        return entry

    def accepted(self, prompt_tokens: int) -> None:
        """The engine has taken a request of this router with so many prompt tokens."""
        self._accepted_tokens += prompt_tokens

    def prefilled(self, entry: Sent) -> None:
        """The first token came: its prompt is no longer pending."""
        if entry in self._unreported:
            self._unreported_tokens -= entry.uncached_tokens
            entry.uncached_tokens = 0

    def done(self, entry: Sent) -> None:
        """The request of `sent` has ended, in whatever way."""
        self.in_flight -= 1
        try:
            self._unreported.remove(entry)
        except ValueError:
            return
        self._forget(entry)

    def sequences(self) -> int:
        """Requests in the engine: running, waiting and just sent."""
        return self.report.running + self.report.waiting + len(self._unreported)

    def pending_tokens(self, now: float) -> float:
        """Prompt tokens still to be computed: what was reported, less what was computed since, plus what was sent."""
        return self.view(now)[0]

    def kv_blocks(self) -> float:
        """Blocks in use, with those of what was just sent."""
        return self.view(self.reported_at)[2]

    def view(self, now: float, herd: float = 1.0) -> tuple[float, float, float]:
        """(pending tokens, sequences, KV blocks) in one call: a policy asks for them for every engine.

        Args:
            herd: requests that all routers together have sent for each one that this router has sent. They saw the
                same reports, so they have probably sent theirs where this one sent its own.
        """
        report = self.report
        pending = report.uncached_tokens - report.prefill_tokens_per_s * (now - self.reported_at)
        return (
            (pending if pending > 0 else 0.0) + herd * self._unreported_tokens,
            report.running + report.waiting + herd * len(self._unreported),
            report.kv_blocks_used + herd * self._unreported_blocks,
        )

    def has_room(self) -> bool:
        """Whether the engine's batch and short queue can take one more."""
        if self.full:
            return False
        limit = self.report.max_num_seqs + self.report.max_waiting
        return limit == 0 or self.sequences() < limit
