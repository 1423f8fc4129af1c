"""The flight recorder: the last routing decisions in memory, and as JSON lines if asked for. No prompts, no outputs."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from router.policies import Candidate, Query
from tandem.router.v1 import router_pb2 as rpb

if TYPE_CHECKING:
    from router.admission import Grant

log = logging.getLogger("router.recorder")

# Hash ids in the file cover so many tokens each, as in Mooncake's traces.
TRACE_BLOCK_TOKENS = 512


@dataclass
class Decision:
    """One decision and how it went."""

    number: int
    # Only while the request lives: hashes of its prompt, for the file.
    query: Query | None
    request_id: str
    prompt_tokens: int
    unix_ms: int
    policy: str
    chosen: str
    block_size: int
    candidates: list[Candidate]
    excluded: list[tuple[str, str]]
    attempt: int
    queued_ms: float
    reason: str
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    outcome: str = ""

    def accepted(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens

    def first_token(self, ttft_s: float) -> None:
        self.ttft_ms = ttft_s * 1000

    def to_proto(self) -> rpb.RouteDecision:
        result = rpb.RouteDecision(
            request_id=self.request_id,
            unix_ms=self.unix_ms,
            policy=self.policy,
            chosen=self.chosen,
            reason=self.reason,
            prompt_tokens=self.prompt_tokens,
            actual_cached_tokens=self.cached_tokens,
            outcome=self.outcome,
            queued_ms=self.queued_ms,
            ttft_ms=self.ttft_ms,
            attempt=self.attempt,
        )
        for candidate in sorted(self.candidates, key=lambda candidate: candidate.engine.name):
            result.candidates.add(
                address=candidate.engine.name,
                matched_blocks=candidate.matched_blocks,
                predicted_ms=candidate.predicted_s * 1000,
                parts={name: seconds * 1000 for name, seconds in candidate.parts.items()},
            )
        for address, why in self.excluded:
            result.candidates.add(address=address, excluded=why)
        return result


def explain(chosen: Candidate, candidates: list[Candidate], policy: str) -> str:
    """One line for people."""
    others = len(candidates) - 1
    if policy.startswith("prefix"):
        size = chosen.engine.block_size
        text = f"holds {chosen.matched_blocks * size} prompt tokens"
        if chosen.predicted_s:
            text += f", first token in about {chosen.predicted_s * 1000:.0f} ms"
    else:
        text = f"cost {chosen.cost_s:g}"
    return f"{text}; {others} other{'' if others == 1 else 's'} considered"


class Recorder:
    """Keeps the last decisions and tells followers about finished ones."""

    def __init__(self, size: int, path: str = "") -> None:
        self._last: deque[Decision] = deque(maxlen=size)
        self._number = 0
        self._followers: set[asyncio.Queue[Decision]] = set()
        self._file: TextIO | None = Path(path).open("a") if path else None  # noqa: SIM115

    def decided(self, query: Query, grant: Grant, attempt: int, queued_s: float) -> Decision:
        self._number += 1
        chosen = grant.candidate
        decision = Decision(
            number=self._number,
            query=query,
            request_id=query.request_id,
            prompt_tokens=query.prompt_tokens,
            unix_ms=int(time.time() * 1000),
            policy=grant.policy,
            chosen=grant.engine.address,
            block_size=chosen.engine.block_size,
            candidates=grant.candidates,
            excluded=[],
            attempt=attempt,
            queued_ms=queued_s * 1000,
            reason=explain(chosen, grant.candidates, grant.policy),
        )
        self._last.append(decision)
        return decision

    def finished(self, decision: Decision, outcome: str, completion_tokens: int) -> None:
        decision.outcome = outcome
        for queue in self._followers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(decision)
        if self._file is not None:
            self._file.write(json.dumps(_line(decision, completion_tokens)) + "\n")
            self._file.flush()
        decision.query = None

    def last(self, count: int) -> list[Decision]:
        """The last decisions, oldest first."""
        return list(self._last)[-count:] if count else []

    def follow(self) -> asyncio.Queue[Decision]:
        queue: asyncio.Queue[Decision] = asyncio.Queue(maxsize=1000)
        self._followers.add(queue)
        return queue

    def unfollow(self, queue: asyncio.Queue[Decision]) -> None:
        self._followers.discard(queue)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(decision: Decision, completion_tokens: int) -> dict[str, object]:
    """Mooncake's trace fields first, so that a recording can be replayed, then the decision."""
    step = max(1, TRACE_BLOCK_TOKENS // max(1, decision.block_size))
    hashes = decision.query.hashes(decision.block_size) if decision.query else []
    return {
        "timestamp": decision.unix_ms,
        "input_length": decision.prompt_tokens,
        "output_length": completion_tokens,
        "hash_ids": [int.from_bytes(key[:6], "big") for key in hashes[step - 1 :: step]],
        "request_id": decision.request_id,
        "policy": decision.policy,
        "engine": decision.chosen,
        "attempt": decision.attempt,
        "outcome": decision.outcome,
        "queued_ms": round(decision.queued_ms, 2),
        "ttft_ms": None if decision.ttft_ms is None else round(decision.ttft_ms, 2),
        "cached_tokens": decision.cached_tokens,
        "candidates": [
            {
                "engine": candidate.engine.name,
                "matched_blocks": candidate.matched_blocks,
                "predicted_ms": round(candidate.predicted_s * 1000, 2),
            }
            for candidate in decision.candidates
        ],
    }
