"""The waiting queue: who may start, when, and where.

Order: priority steps are worth `ageing_s` seconds of waiting, so the key `priority * ageing_s + arrival` never changes
while a request waits and no class starves. A full queue sheds the last in that order.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from router.engine import Engine
from router.fleet import Fleet
from router.load import Sent
from router.policies import Candidate, Policy, Query
from router.settings import RouterSettings
from tandem.errors import TandemError


@dataclass(frozen=True)
class Grant:
    """Leave to send a request to an engine. Give it back with `Admission.release`."""

    engine: Engine
    candidate: Candidate
    candidates: list[Candidate]
    sent: Sent
    policy: str


@dataclass(eq=False)
class Job:
    """One request that wants to start. Times are monotonic seconds."""

    model: str
    query: Query
    priority: int = 0
    tenant: str = ""
    arrival: float = field(default_factory=time.monotonic)
    deadline: float | None = None
    # Engines that this request must not go to, and a numerics id that it prefers.
    avoid: frozenset[str] = frozenset()
    numerics_id: str = ""
    tokenizer_digest: str = ""
    # A request that was accepted once: it is not shed, and waits for an engine to come.
    again: bool = False
    running: bool = False


class Admission:
    """Grants engines to jobs, in order, within the limits."""

    def __init__(self, fleet: Fleet, settings: RouterSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._settings = settings
        self._clock = clock
        self.shed = 0
        self._waiting: list[tuple[float, int, Job, asyncio.Future[Grant]]] = []
        self._numbers = itertools.count()
        self._running: Counter[str] = Counter()
        self._queued: Counter[str] = Counter()
        # Departures of the queue per second, moving average, for the estimate of a wait.
        self._rate = 0.0
        self._left_at = 0.0
        self._kick_planned = False
        fleet.on_change(self.kick)

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._fleet.policy

    def __len__(self) -> int:
        return len(self._waiting)

    def depth_by_priority(self) -> dict[int, int]:
        return dict(Counter(job.priority for _, _, job, _ in self._waiting))

    async def acquire(self, job: Job) -> Grant:
        """Waits for a place.

        Raises:
            TandemError: OVERLOADED (queue full, or the deadline cannot be met), QUOTA, DEADLINE, NO_ENGINE.
        """
        if not self._waiting or job.again:
            grant = self._try(job)
            if grant is not None:
                return grant
        self._check_room(job)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Grant] = loop.create_future()
        key = job.priority * self._settings.ageing_s + job.arrival
        entry = (key, next(self._numbers), job, future)
        bisect.insort(self._waiting, entry, key=lambda item: item[:2])
        self._queued[job.tenant] += 1
        self._plan_kick()
        try:
            async with asyncio.timeout(self._patience(job)):
                return await self._granted(future, job)
        except TimeoutError:
            raise self._expired(job) from None
        finally:
            self._leave(entry)

    async def _granted(self, future: asyncio.Future[Grant], job: Job) -> Grant:
        try:
            return await future
        except asyncio.CancelledError:
            # Granted and given up in the same turn of the loop: the place must not leak.
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result(), job)
            raise

    def _patience(self, job: Job) -> float | None:
        limits = []
        if job.deadline is not None:
            limits.append(job.deadline - self._clock())
        if job.again:
            limits.append(self._settings.resume_wait_s)
        elif self._settings.queue_timeout_s:
            limits.append(job.arrival + self._settings.queue_timeout_s - self._clock())
        return max(0.0, min(limits)) if limits else None

    def _expired(self, job: Job) -> TandemError:
        if job.again and (job.deadline is None or self._clock() < job.deadline):
            return TandemError(
                "NO_ENGINE",
                f"no engine could go on with the request within {self._settings.resume_wait_s:g} s",
                retry_after_s=5.0,
                model=job.model,
            )
        waited = self._clock() - job.arrival
        return TandemError("DEADLINE", f"the deadline passed after {waited:.1f} s in the router's queue")

    def _leave(self, entry: tuple[float, int, Job, asyncio.Future[Grant]]) -> None:
        self._queued[entry[2].tenant] -= 1
        if not self._queued[entry[2].tenant]:
            del self._queued[entry[2].tenant]
        position = bisect.bisect_left(self._waiting, entry[:2], key=lambda item: item[:2])
        if position < len(self._waiting) and self._waiting[position][1] == entry[1]:
            del self._waiting[position]

    def _check_room(self, job: Job) -> None:
        """Refuses at once what cannot wait."""
        if job.again:
            return
        limit = self._settings.tenant_max_queued
        if limit and job.tenant and self._queued[job.tenant] >= limit:
            self.shed += 1
            raise TandemError(
                "QUOTA",
                f"{self._queued[job.tenant]} requests of this tenant are waiting, the limit is {limit}",
                retry_after_s=self.wait_estimate_s(),
                limit=limit,
            )
        wait = self.wait_estimate_s(job)
        if job.deadline is not None and self._rate and self._clock() + wait > job.deadline:
            self.shed += 1
            raise TandemError(
                "OVERLOADED",
                f"the wait of about {wait:.1f} s is longer than what is left of the deadline",
                retry_after_s=wait,
            )
        if len(self._waiting) >= self._fleet.live.max_queued:
            self._shed_last(job)

    def _shed_last(self, job: Job) -> None:
        key = job.priority * self._settings.ageing_s + job.arrival
        error = TandemError(
            "OVERLOADED",
            f"{len(self._waiting)} requests are waiting, the limit is {self._fleet.live.max_queued}",
            retry_after_s=self.wait_estimate_s(),
            limit=self._fleet.live.max_queued,
        )
        self.shed += 1
        for entry in reversed(self._waiting):
            if entry[2].again:
                continue
            if entry[0] <= key or entry[2].priority <= job.priority:
                break
            self._waiting.remove(entry)
            if not entry[3].done():
                entry[3].set_exception(error)
            return
        raise error

    def wait_estimate_s(self, job: Job | None = None) -> float:
        """Seconds that a newcomer (or this job) would wait, between 1 and 60 s; 1 while nothing is known."""
        ahead = len(self._waiting)
        if job is not None:
            key = job.priority * self._settings.ageing_s + job.arrival
            ahead = bisect.bisect_left(self._waiting, key, key=lambda item: item[0])
        if not self._rate:
            return 1.0
        estimate = (ahead + 1) / self._rate
        return estimate if job is not None else min(60.0, max(1.0, estimate))

    # -- granting

    def _plan_kick(self) -> None:
        if not self._kick_planned:
            self._kick_planned = True
            asyncio.get_running_loop().call_soon(self.kick)

    def kick(self) -> None:
        """Something may have become free: grants what can be granted, in order."""
        self._kick_planned = False
        if not self._waiting:
            return
        blocked: set[tuple[str, frozenset[str]]] = set()
        for entry in list(self._waiting):
            _, _, job, future = entry
            place = (job.model, job.avoid)
            if future.done() or place in blocked:
                continue
            grant = self._try(job)
            if grant is not None:
                self._waiting.remove(entry)
                self._note_departure()
                future.set_result(grant)
            elif not self._tenant_full(job):
                if not job.again and not self._fleet.usable(job.model):
                    future.set_exception(self._gone(job))
                blocked.add(place)

    def _gone(self, job: Job) -> TandemError:
        return TandemError("NO_ENGINE", f"no engine serves {job.model} any more", retry_after_s=5.0, model=job.model)

    def _note_departure(self) -> None:
        now = self._clock()
        if self._left_at:
            self._rate = 0.9 * self._rate + 0.1 / max(1e-3, now - self._left_at)
        self._left_at = now

    def _tenant_full(self, job: Job) -> bool:
        limit = self._settings.tenant_max_running
        return bool(limit and job.tenant and not job.running and self._running[job.tenant] >= limit)

    def eligible(self, job: Job) -> list[Engine]:
        """Engines that could take the job now; of those with the preferred numerics id if there are any."""
        engines = [
            engine
            for engine in self._fleet.usable(job.model)
            if not job.tokenizer_digest or engine.model is None or engine.model.tokenizer_digest == job.tokenizer_digest
        ]
        if job.avoid:
            engines = [engine for engine in engines if engine.address not in job.avoid] or engines
        if job.numerics_id:
            same = [engine for engine in engines if engine.model and engine.model.numerics_id == job.numerics_id]
            engines = same or engines
        return [engine for engine in engines if engine.load.has_room()]

    def _try(self, job: Job) -> Grant | None:
        if self._tenant_full(job):
            return None
        engines = self.eligible(job)
        if not engines:
            return None
        now, policy = self._clock(), self._fleet.policy
        by_name = {engine.address: engine for engine in engines}
        candidates = policy.rank(job.query, [engine.load for engine in engines], now)
        chosen = policy.choose(candidates, job.query)
        policy.sent(job.query, chosen, now)
        load = chosen.engine
        uncached = max(1, job.query.prompt_tokens - chosen.matched_blocks * load.block_size)
        blocks = job.query.prompt_tokens // max(1, load.block_size) + 1 - chosen.matched_blocks
        sent = load.sent(now, uncached, max(0, blocks))
        if not job.running:
            job.running = True
            self._running[job.tenant] += 1
        engine = by_name[load.name]
        engine.began()
        return Grant(engine, chosen, candidates, sent, policy.name)

    def release(self, grant: Grant, job: Job, final: bool = True) -> None:
        """Gives the place back; `final` also ends the job's count for its tenant."""
        grant.engine.load.done(grant.sent)
        if final:
            self.finish(job)
        self._plan_kick()

    def finish(self, job: Job) -> None:
        """The job is over."""
        if job.running:
            job.running = False
            self._running[job.tenant] -= 1
            if not self._running[job.tenant]:
                del self._running[job.tenant]
