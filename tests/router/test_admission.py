"""The waiting queue: order, bounds, tenants, deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.admission import Admission, Grant, Job
from router.fleet import Fleet
from router.load import LoadReport
from router.policies import Query
from router.settings import RouterSettings
from tandem.engine.v1 import engine_pb2 as epb
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb


class Desk:
    """An admission over engines that exist only as views: no network."""

    def __init__(self, engines: int = 1, places: int = 1, **settings: Any) -> None:
        addresses = ",".join(f"127.0.0.1:{9000 + number}" for number in range(engines))
        self.settings = RouterSettings(engines=addresses, **settings)
        self.fleet = Fleet(self.settings)
        from router.engine import Engine

        for address in addresses.split(","):
            engine = Engine(address, self.settings, self.fleet.index, lambda: self.fleet.policy, self.fleet._changed)
            engine.model = pb.ModelInfo(name="mock", tokenizer_digest="tok")
            engine.last = epb.WatchLoadResponse(state=epb.ENGINE_STATE_READY)
            engine.connected = True
            engine.load.update(LoadReport(max_num_seqs=places), time.monotonic())
            self.fleet.engines[address] = engine
        self.admission = Admission(self.fleet, self.settings)
        self.granted: list[str] = []

    def job(self, name: str = "j", **fields: Any) -> Job:
        return Job("mock", Query(name, 10), **fields)

    def ask(self, job: Job) -> asyncio.Task[Grant]:
        async def run() -> Grant:
            grant = await self.admission.acquire(job)
            self.granted.append(job.query.request_id)
            return grant

        return asyncio.create_task(run())


@pytest.fixture
async def turn() -> AsyncIterator[Any]:
    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    yield settle


async def test_first_come_first_served_within_a_class(turn: Any) -> None:
    desk = Desk()
    first = await desk.admission.acquire(job := desk.job("0"))
    tasks = [desk.ask(desk.job(str(number))) for number in (1, 2, 3)]
    await turn()
    assert desk.granted == []
    for task in tasks:
        desk.admission.release(first, job)
        first, job = await task, desk.job("x")
    assert desk.granted == ["1", "2", "3"]


async def test_lower_priority_number_goes_first_but_age_counts(turn: Any) -> None:
    desk = Desk(ageing_s=10.0)
    held = await desk.admission.acquire(job := desk.job())
    now = time.monotonic()
    tasks = [
        desk.ask(desk.job("low", priority=1, arrival=now)),
        desk.ask(desk.job("high", priority=0, arrival=now + 5)),
        desk.ask(desk.job("old-low", priority=1, arrival=now - 20)),
    ]
    await turn()
    for _ in tasks:
        desk.admission.release(held, job)
        await turn()
        held = next(task.result() for task in tasks if task.done() and task not in desk.__dict__.setdefault("seen", []))
        desk.__dict__["seen"].append(next(task for task in tasks if task.done() and task.result() is held))
        job = desk.job()
    assert desk.granted == ["old-low", "high", "low"]


async def test_full_queue_sheds_the_newcomer_or_a_lower_class(turn: Any) -> None:
    desk = Desk(max_queued=2)
    await desk.admission.acquire(desk.job())
    waiting = [desk.ask(desk.job(f"w{number}", priority=5)) for number in range(2)]
    await turn()
    with pytest.raises(TandemError) as caught:
        await desk.admission.acquire(desk.job("same", priority=5))
    assert (caught.value.reason, caught.value.metadata["limit"]) == ("OVERLOADED", "2")
    assert caught.value.retry_after_s and caught.value.retry_after_s >= 1
    urgent = desk.ask(desk.job("urgent", priority=0))
    await turn()
    with pytest.raises(TandemError) as caught:
        await waiting[1]
    assert caught.value.reason == "OVERLOADED"
    assert len(desk.admission) == 2 and not urgent.done()
    assert desk.admission.shed == 2
    for task in (waiting[0], urgent):
        task.cancel()


async def test_tenants_have_their_own_limits(turn: Any) -> None:
    desk = Desk(places=10, tenant_max_running=2, tenant_max_queued=1)
    held = [(job, await desk.admission.acquire(job)) for job in (desk.job(tenant="a"), desk.job(tenant="a"))]
    third = desk.ask(desk.job("a3", tenant="a"))
    await turn()
    assert not third.done()
    await desk.admission.acquire(desk.job(tenant="b"))
    with pytest.raises(TandemError) as caught:
        await desk.admission.acquire(desk.job(tenant="a"))
    assert caught.value.reason == "QUOTA"
    desk.admission.release(held[0][1], held[0][0])
    await asyncio.wait_for(third, 1)


async def test_no_overtaking_while_others_wait(turn: Any) -> None:
    desk = Desk()
    held = await desk.admission.acquire(job := desk.job())
    early = desk.ask(desk.job("early"))
    await turn()
    desk.admission.release(held, job)
    late = desk.ask(desk.job("late"))
    await asyncio.wait_for(early, 1)
    await turn()
    assert not late.done()
    late.cancel()


async def test_deadline_and_queue_timeout_in_the_queue() -> None:
    for desk, fields in (
        (Desk(), {"deadline": time.monotonic() + 0.1}),
        (Desk(queue_timeout_s=0.1), {}),
    ):
        await desk.admission.acquire(desk.job())
        with pytest.raises(TandemError) as caught:
            await desk.admission.acquire(desk.job(**fields))
        assert caught.value.reason == "DEADLINE"
        assert len(desk.admission) == 0


async def test_hopeless_deadline_is_refused_at_once(turn: Any) -> None:
    desk = Desk()
    held = await desk.admission.acquire(job := desk.job())
    waiting = [desk.ask(desk.job(str(number))) for number in range(3)]
    await turn()
    # Departures a second apart teach the rate.
    desk.admission._rate = 1.0
    with pytest.raises(TandemError) as caught:
        await desk.admission.acquire(desk.job(deadline=time.monotonic() + 2))
    assert caught.value.reason == "OVERLOADED"
    assert 3.9 < (caught.value.retry_after_s or 0) < 4.1
    assert desk.admission.shed == 1
    for task in waiting:
        task.cancel()
    desk.admission.release(held, job)


async def test_cancelled_waiter_leaves_and_frees(turn: Any) -> None:
    desk = Desk()
    held = await desk.admission.acquire(job := desk.job())
    waiter = desk.ask(desk.job())
    await turn()
    waiter.cancel()
    await turn()
    assert len(desk.admission) == 0
    # Granted and cancelled in the same turn: the place is given back.
    second = desk.ask(desk.job())
    await turn()
    desk.admission.release(held, job)
    desk.admission.kick()
    second.cancel()
    await turn()
    assert all(engine.load.in_flight == 0 for engine in desk.fleet.engines.values())
    await asyncio.wait_for(desk.admission.acquire(desk.job()), 1)


async def test_waiting_ends_when_the_last_engine_goes(turn: Any) -> None:
    desk = Desk()
    await desk.admission.acquire(desk.job())
    waiter = desk.ask(desk.job())
    again = desk.ask(desk.job("again", again=True))
    await turn()
    engine = next(iter(desk.fleet.engines.values()))
    engine.connected = False
    desk.admission.kick()
    with pytest.raises(TandemError) as caught:
        await waiter
    assert caught.value.reason == "NO_ENGINE"
    await turn()
    assert not again.done(), "an accepted request waits for an engine to come back"
    engine.connected = True
    engine.load.update(LoadReport(max_num_seqs=4), time.monotonic())
    desk.admission.kick()
    await asyncio.wait_for(again, 1)


async def test_resumed_request_gives_up_after_a_while() -> None:
    desk = Desk(resume_wait_s=0.1)
    next(iter(desk.fleet.engines.values())).connected = False
    with pytest.raises(TandemError) as caught:
        await desk.admission.acquire(desk.job(again=True))
    assert caught.value.reason == "NO_ENGINE"


async def test_tokenizer_digest_selects_engines() -> None:
    desk = Desk(engines=2)
    other = list(desk.fleet.engines.values())[1]
    other.model = pb.ModelInfo(name="mock", tokenizer_digest="other")
    grant = await desk.admission.acquire(desk.job(tokenizer_digest="other"))
    assert grant.engine is other
