"""What an engine logs of its traffic: whole requests of those who did not opt out, and nothing by default."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine_service.process import Process
from engine_service.settings import EngineSettings
from engine_service.speculation import NullSpeculation
from engine_service.speculation.sequence_state import SequenceState
from tandem import traffic
from tandem.draft.v1 import draft_pb2
from tandem.inference.v1 import inference_pb2 as pb
from tandem.lm.types import Sequence
from tandem.traffic import Entry
from tests.engine_service.fakes import FakeRunner
from tests.engine_service.server import ask, serve
from tests.engine_service.test_metrics import MODEL, Scrape

SAMPLED = pb.SamplingParams(temperature=0.5, seed=7)


async def test_finished_requests_are_logged(tmp_path: Path) -> None:
    async with serve(traffic_log=str(tmp_path / "t"), metrics_listen="127.0.0.1:0") as server:
        one = await server.generate(ask("hello"))
        two = await server.generate(ask("hi", n=2, sampling=SAMPLED))
        await server.idle()
        log = server.engine.traffic
        assert log is not None
        await asyncio.to_thread(log.close)
        got = Scrape(server)
        assert got("tandem_engine_traffic_requests_total", **MODEL) == 2
        assert got("tandem_engine_traffic_dropped_total", **MODEL) == 0
        header = traffic.Header(server.runner.spec.model_digest, server.engine.tokenizer.bundle.digest, 258)
    assert list(traffic.read(tmp_path / "t", header)) == [
        Entry(list(b"hello"), [one.ids()], 0.0, one.accepted.seed),
        Entry(list(b"hi"), [two.ids(0), two.ids(1)], 0.5, 7),
    ]


async def test_a_resumed_request_is_logged_whole(tmp_path: Path) -> None:
    async with serve(traffic_log=str(tmp_path)) as server:
        whole = await server.generate(ask("hello", sampling=SAMPLED))
        choice = pb.ResumeChoice(index=0, emitted_ids=whole.ids()[:3])
        resume = pb.ResumeState(choices=[choice], prompt_tokens=5)
        await server.generate(ask("hello", sampling=SAMPLED, attempt=2, resume=resume))
        await server.idle()
    first, second = traffic.read(tmp_path)
    assert first == second == Entry(list(b"hello"), [whole.ids()], 0.5, 7)


async def test_nothing_of_those_who_opt_out_or_did_not_finish(tmp_path: Path) -> None:
    runner = FakeRunner()
    async with serve(runner, traffic_log=str(tmp_path)) as server:
        await server.generate(ask("a", no_store=True))
        await server.generate(ask("b", cache_salt="tenant"))
        runner.gate.clear()
        call = server.call(ask("c", stop=pb.StopConditions(max_tokens=40)))
        await call.read()
        call.cancel()
        while server.engine.streams:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        runner.gate.set()
        await server.idle()
        await server.generate(ask("d"))
        await server.idle()
    assert [bytes(entry.prompt) for entry in traffic.read(tmp_path)] == [b"d"]


async def test_drafts_are_told_what_not_to_learn_from() -> None:
    class Noting(NullSpeculation):
        def __init__(self) -> None:
            self.updates: list[draft_pb2.SequenceUpdate] = []

        def started(self, sequence: Sequence, salt: str) -> None:
            self.updates.append(SequenceState(sequence, salt).update(0))

    speculation = Noting()
    async with serve(speculation=speculation) as server:
        await server.generate(ask("a", no_store=True, n=2))
        await server.generate(ask("b"))
    assert [update.no_store for update in speculation.updates] == [True, True, False]


async def test_nothing_is_logged_by_default() -> None:
    assert EngineSettings().traffic_log == ""
    async with serve() as server:
        await server.generate(ask())
        assert server.engine.traffic is None


async def test_a_directory_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    process = Process(EngineSettings(listen=f"unix:{tmp_path / 'e'}", traffic_log=str(tmp_path / "f")))
    with pytest.raises(OSError, match=str(tmp_path / "f")):
        await process.start()
    await process.stop()
