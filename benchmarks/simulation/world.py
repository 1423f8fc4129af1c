"""The simulated fleet: routers that run the product's own policy and index code, and engines in virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulation.engine import ServiceModel, SimEngine, SimRequest
from benchmarks.simulation.traces import Trace
from router.index import PrefixIndex
from router.load import EngineLoad, Sent
from router.policies import Candidate, Policy, Query, make_policy

# What every request gives as max_tokens.
MAX_TOKENS = 1024


@dataclass(frozen=True)
class SimConfig:
    """One run. Times in seconds."""

    policy: str
    engines: int = 8
    routers: int = 1
    seed: int = 1
    timeout_s: float = 30.0
    max_queued: int = 1024
    report_s: float = 0.25
    # One way between router and engine, for requests, reports and events alike.
    latency_s: float = 0.002
    # This many engines run ten times slower.
    slow_engines: int = 0


@dataclass(frozen=True)
class SimResult:
    """What came out. Times in seconds. Requests that were not served count with the timeout in the TTFT percentiles."""

    policy: str
    trace: str
    engines: int
    routers: int
    requests: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    served: float
    # Coefficient of variation over engines of the time that each was busy.
    imbalance_cov: float
    # Mean absolute error of predicted cached tokens, as a share of the prompt.
    prediction_error: float
    ttfts: tuple[float, ...] = ()


class SimRouter:
    """One router: an index, a policy, load views and a queue."""

    def __init__(self, world: World, number: int) -> None:
        config = world.config
        self.world = world
        self.index = PrefixIndex(50_000_000)
        self.policy: Policy = make_policy(config.policy, self.index, random.Random(f"{config.seed}-{number}"))
        self.loads: list[EngineLoad] = []
        for engine in range(config.engines):
            load = EngineLoad(
                f"engine-{engine:04d}", self.index.new_slot(), block_size=world.trace.block_tokens, events_live=True
            )
            self.loads.append(load)
            self.policy.add(load)
        self.number_of = {load.name: number for number, load in enumerate(self.loads)}
        self.queue: deque[tuple[SimRequest, Query]] = deque()

    def arrive(self, request: SimRequest, now: float) -> None:
        query = Query(
            # No router knows how long an answer will be.
            "",
            request.trace.input_length,
            MAX_TOKENS,
            lambda _size, keys=request.keys: keys,
        )
        if not self.queue and self.dispatch(request, query, now):
            return
        if len(self.queue) >= self.world.config.max_queued:
            self.world.lost(request)
            return
        self.queue.append((request, query))

    def pump(self, now: float) -> None:
        """Sends on what can be sent, in order."""
        while self.queue:
            request, query = self.queue[0]
            if now > request.deadline:
                self.queue.popleft()
                self.world.lost(request)
                continue
            if not self.dispatch(request, query, now):
                return
            self.queue.popleft()

    def dispatch(self, request: SimRequest, query: Query, now: float) -> bool:
        engines = [load for load in self.loads if load.has_room()]
        if not engines:
            return False
        chosen = self.policy.choose(self.policy.rank(query, engines, now), query)
        self.policy.sent(query, chosen, now)
        load = chosen.engine
        uncached = max(1, query.prompt_tokens - chosen.matched_blocks * load.block_size)
        sent = load.sent(now, uncached, query.prompt_tokens // load.block_size - chosen.matched_blocks + 1)
        request.predicted_tokens = query.prompt_tokens - uncached
        request.token = _Ticket(self, query, chosen, sent, now)
        world = self.world
        world.after(now, world.config.latency_s, world.to_engine, self.number_of[load.name], request)
        return True


@dataclass(slots=True)
class _Ticket:
    router: SimRouter
    query: Query
    chosen: Candidate
    sent: Sent
    at: float


class World:
    """The event loop."""

    def __init__(self, trace: Trace, model: ServiceModel, config: SimConfig) -> None:
        self.trace = trace
        self.config = config
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self.now = 0.0
        self.routers = [SimRouter(self, number) for number in range(config.routers)]
        self.engines = [self._engine(number, model) for number in range(config.engines)]
        self._wake = [math.inf] * config.engines
        self._open = len(trace.requests)
        self._ttfts: list[float] = []
        self._served = 0
        self._prompt = self._cached = self._error = 0

    def _engine(self, number: int, model: ServiceModel) -> SimEngine:
        return SimEngine(
            model,
            self.trace.block_tokens,
            stored=lambda keys: self._event(number, "stored", keys),
            removed=lambda keys: self._event(number, "removed", keys),
            first_token=self._first_token,
            done=lambda request, now, ok: self._done(number, request, now, ok),
            slow=10.0 if number < self.config.slow_engines else 1.0,
        )

    def after(self, now: float, delay: float, call: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (now + delay, next(self._order), call, args))

    def _event(self, engine: int, what: str, keys: list[bytes]) -> None:
        self.after(self.now, self.config.latency_s, self._apply_event, engine, what, keys)

    def _apply_event(self, engine: int, what: str, keys: list[bytes]) -> None:
        for router in self.routers:
            slot = router.loads[engine].slot
            if what == "stored":
                router.index.stored(slot, keys)
            else:
                router.index.removed(slot, keys)

    def to_engine(self, number: int, request: SimRequest) -> None:
        engine = self.engines[number]
        if engine.full():
            # ENGINE_FULL: back to its router, to the head of the queue.
            ticket = request.token
            assert isinstance(ticket, _Ticket)
            load = ticket.chosen.engine
            load.done(ticket.sent)
            load.full = True
            ticket.router.queue.appendleft((request, ticket.query))
            return
        self._schedule(number, engine.add(request, self.now))

    def _schedule(self, number: int, at: float) -> None:
        if at < self._wake[number]:
            self._wake[number] = at
            self.after(at, 0.0, self._run_engine, number, at)

    def _run_engine(self, number: int, at: float) -> None:
        if self._wake[number] != at:
            return
        self._wake[number] = math.inf
        self._schedule(number, self.engines[number].run(self.now))

    def _first_token(self, request: SimRequest, now: float) -> None:
        ticket = request.token
        assert isinstance(ticket, _Ticket)
        ticket.chosen.engine.accepted(request.trace.input_length)
        ticket.chosen.engine.prefilled(ticket.sent)
        ticket.router.policy.answered(ticket.query, ticket.chosen, request.cached_tokens, now - ticket.at)
        self._prompt += request.trace.input_length
        self._cached += request.cached_tokens
        self._error += abs(request.cached_tokens - request.predicted_tokens)
        late = now > request.deadline
        self._ttfts.append(self.config.timeout_s if late else now - request.trace.at_s)
        self._served += not late

    def _done(self, number: int, request: SimRequest, now: float, ok: bool) -> None:
        ticket = request.token
        assert isinstance(ticket, _Ticket)
        ticket.chosen.engine.done(ticket.sent)
        if not ok:
            self.lost(request)
        else:
            self._open -= 1
        self.after(now, self.config.latency_s, ticket.router.pump, now + self.config.latency_s)

    def lost(self, request: SimRequest) -> None:
        """Not served within the timeout, or shed."""
        self._open -= 1
        self._ttfts.append(self.config.timeout_s)

    def _report(self, group: int, groups: int) -> None:
        for number in range(group, self.config.engines, groups):
            report = self.engines[number].report(self.now)
            for router in self.routers:
                router.loads[number].update(report, self.now)
        if group == 0:
            for router in self.routers:
                router.pump(self.now)
        if self._open:
            self.after(self.now, self.config.report_s, self._report, group, groups)

    def run(self) -> SimResult:
        """Runs the whole trace."""
        rng = random.Random(self.config.seed)
        # Block ids become 16-byte keys, one object per id.
        keys: dict[int, bytes] = {}
        for entry in self.trace.requests:
            chain = [keys.setdefault(key, key.to_bytes(16, "little")) for key in entry.hash_ids]
            whole = chain[: entry.input_length // self.trace.block_tokens]
            request = SimRequest(entry, whole, entry.at_s + self.config.timeout_s)
            router = self.routers[rng.randrange(self.config.routers)]
            self.after(entry.at_s, 0.0, self._arrive, router, request)
        groups = min(10, self.config.engines)
        for group in range(groups):
            self.after(0.0, group * self.config.report_s / groups, self._report, group, groups)
        while self._events and self._open:
            self.now, _, call, args = heapq.heappop(self._events)
            call(*args)
        return self._result()

    def _arrive(self, router: SimRouter, request: SimRequest) -> None:
        router.arrive(request, self.now)

    def _result(self) -> SimResult:
        ttfts = sorted(self._ttfts)
        busy = [engine.busy_s for engine in self.engines]
        mean = statistics.fmean(busy) if busy else 0.0
        return SimResult(
            policy=self.config.policy,
            trace=self.trace.name,
            engines=self.config.engines,
            routers=self.config.routers,
            requests=len(self.trace.requests),
            hit_rate=self._cached / max(1, self._prompt),
            ttft_p50_s=percentile(ttfts, 0.50),
            ttft_p99_s=percentile(ttfts, 0.99),
            served=self._served / max(1, len(self.trace.requests)),
            imbalance_cov=statistics.pstdev(busy) / mean if mean else 0.0,
            prediction_error=self._error / max(1, self._prompt),
            ttfts=tuple(ttfts),
        )


def percentile(ordered: list[float], share: float) -> float:
    """Of a sorted list; 0 if it is empty."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
