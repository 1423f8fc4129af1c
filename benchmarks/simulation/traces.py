"""Traces for the router simulator, in Mooncake's JSON-lines schema: generated (seeded) or read from a file.

The generators are shaped on published statistics; they are no copies of the traces:

- conversation, toolagent: Mooncake (Qin et al., FAST 2025), whose hour of chat has 12,031 requests with 12,035 input
  and 343 output tokens on average and 40% of the prompt tokens reusable; tools and agents: 23,608 requests, 8,596 and
  182 tokens, 59%.
- burst: BurstGPT (Wang et al., 2024): arrivals whose gaps follow a Gamma distribution much burstier than Poisson's,
  short prompts (about 620 tokens), answers of a few hundred tokens.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `hash_ids` names the prompt's blocks; equal ids mean equal prefixes up to there."""

    at_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_tokens: int
    requests: list[TraceRequest]

    def reusable_share(self) -> float:
        """Share of prompt tokens that an endless cache would hold."""
        seen: set[int] = set()
        hit = total = 0
        for request in self.requests:
            total += request.input_length
            for position, key in enumerate(request.hash_ids):
                if key not in seen:
                    break
                hit += min(self.block_tokens, request.input_length - position * self.block_tokens)
            seen.update(request.hash_ids)
        return hit / total if total else 0.0

    def summary(self) -> str:
        count = max(1, len(self.requests))
        mean_in = sum(request.input_length for request in self.requests) / count
        mean_out = sum(request.output_length for request in self.requests) / count
        span = self.requests[-1].at_s if self.requests else 0.0
        return (
            f"{self.name}: {len(self.requests)} requests in {span:.0f} s, {mean_in:.0f} input and {mean_out:.0f} "
            f"output tokens on average, {100 * self.reusable_share():.0f}% of prompt tokens reusable"
        )


@dataclass(frozen=True)
class Shape:
    """What a generated trace looks like. Lengths in tokens, times in seconds."""

    block_tokens: int
    # Shared beginnings (system prompts, tool descriptions): how many, how long, how uneven their use (Zipf exponent).
    prefixes: int
    prefix_mean: float
    prefix_zipf: float
    # The first message of a session and each later one: median and sigma of a lognormal.
    first: tuple[float, float]
    later: tuple[float, float]
    output: tuple[float, float]
    # Turns of a session: mean of a geometric distribution, and seconds between them (median, sigma).
    turns: float
    pause: tuple[float, float]
    # Shape of the Gamma distribution of gaps between sessions: 1 is Poisson, less is burstier.
    gamma: float
    max_input: int = 120_000


SHAPES = {
    "conversation": Shape(512, 20, 600, 1.0, (6100, 1.05), (850, 1.2), (260, 0.75), 2.1, (45, 0.8), 1.0),
    "toolagent": Shape(512, 60, 2900, 1.1, (2300, 1.2), (1000, 1.1), (120, 0.9), 2.0, (9, 0.8), 1.0),
    "burst": Shape(64, 30, 180, 1.2, (220, 1.1), (120, 1.0), (210, 0.8), 2.2, (30, 0.8), 0.25, max_input=16_000),
}


def generate(name: str, requests: int, rate: float, seed: int) -> Trace:
    """Makes a trace of about `rate` requests per second.

    Raises:
        ValueError: unknown name.
    """
    if name not in SHAPES:
        raise ValueError(f"no trace {name!r}; known: {', '.join(SHAPES)}")
    shape, rng = SHAPES[name], random.Random(f"{name}-{seed}")
    maker = _Maker(shape, rng)
    turn_queue: list[tuple[float, int, _Session]] = []
    result: list[TraceRequest] = []
    session_rate = rate / shape.turns
    next_start, number = 0.0, 0
    while len(result) < requests:
        while not turn_queue or next_start <= turn_queue[0][0]:
            number += 1
            heapq.heappush(turn_queue, (next_start, number, maker.session()))
            next_start += rng.gammavariate(shape.gamma, 1 / (shape.gamma * session_rate))
        at, order, session = heapq.heappop(turn_queue)
        request = maker.turn(session, at)
        result.append(request)
        if session.turns_left > 0 and session.length < shape.max_input:
            pause = rng.lognormvariate(math.log(shape.pause[0]), shape.pause[1])
            heapq.heappush(turn_queue, (at + pause, order, session))
    return Trace(name, shape.block_tokens, result)


@dataclass
class _Session:
    blocks: list[int]
    length: int
    turns_left: int
    started: bool = False


class _Maker:
    """Makes sessions and their turns."""

    def __init__(self, shape: Shape, rng: random.Random) -> None:
        self._shape = shape
        self._rng = rng
        self._ids = 0
        self._prefixes = [self._prefix() for _ in range(shape.prefixes)]
        self._weights = [1 / (rank + 1) ** shape.prefix_zipf for rank in range(shape.prefixes)]

    def _fresh(self, count: int) -> list[int]:
        self._ids += count
        return list(range(self._ids - count, self._ids))

    def _prefix(self) -> list[int]:
        tokens = self._rng.lognormvariate(math.log(self._shape.prefix_mean), 0.6)
        return self._fresh(max(1, round(tokens / self._shape.block_tokens)))

    def session(self) -> _Session:
        prefix = self._rng.choices(self._prefixes, self._weights)[0]
        turns = 1
        while self._rng.random() > 1 / self._shape.turns:
            turns += 1
        return _Session(list(prefix), len(prefix) * self._shape.block_tokens, turns)

    def turn(self, session: _Session, at: float) -> TraceRequest:
        shape, rng = self._shape, self._rng
        median, sigma = shape.later if session.started else shape.first
        added = max(8, int(rng.lognormvariate(math.log(median), sigma)))
        length = min(shape.max_input, session.length + added)
        full = length // shape.block_tokens
        # A block that was partial before is another block now that it has grown.
        session.blocks += self._fresh(max(0, full - len(session.blocks)))
        ids = list(session.blocks)
        if length % shape.block_tokens:
            ids += self._fresh(1)
        output = max(1, int(rng.lognormvariate(math.log(shape.output[0]), shape.output[1])))
        session.started = True
        session.turns_left -= 1
        session.length = length + output
        return TraceRequest(at, length, output, tuple(ids))


def read(path: Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS, limit: int = 0) -> Trace:
    """Reads a Mooncake trace or a router's flight recording (only first attempts; times start at 0).

    Raises:
        ValueError: a line is not of the schema; names the line.
    """
    requests: list[TraceRequest] = []
    first: float | None = None
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if row.get("attempt", 1) != 1:
                    continue
                at = float(row["timestamp"]) / 1000
                first = at if first is None else first
                requests.append(
                    TraceRequest(
                        at - first,
                        int(row["input_length"]),
                        max(1, int(row["output_length"])),
                        tuple(int(key) for key in row.get("hash_ids", ())),
                    )
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number}: no trace line: {error!r}") from error
            if limit and len(requests) >= limit:
                break
    requests.sort(key=lambda request: request.at_s)
    return Trace(path.stem, block_tokens, requests)


def write(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Writes Mooncake's schema."""
    with path.open("w") as out:
        for request in requests:
            row = {
                "timestamp": round(1000 * request.at_s),
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": list(request.hash_ids),
            }
            out.write(json.dumps(row) + "\n")
