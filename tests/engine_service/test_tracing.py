"""The engine's spans: made of the receipt's times, whichever way a request ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from engine_service.tracing import TracedRequest
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.tracing import NULL_TRACER
from tests.engine_service.fakes import FakeRunner
from tests.engine_service.server import ask, serve, until
from tests.tandem.tracing.receiver import Receiver, grpc_receiver

LONG = pb.StopConditions(max_tokens=100)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with grpc_receiver() as made:
        yield made


async def test_phases_are_the_receipts_times(receiver: Receiver) -> None:
    runner = FakeRunner()
    runner.step_seconds = 0.004
    async with serve(runner, otlp_endpoint=receiver.endpoint) as server:
        request = ask("a prompt of twenty!!", request_id="r", n=2, output=pb.OutputOptions(receipt=True))
        receipt = (await server.generate(request)).usage.receipt
    spans = {span.name: span for span in receiver.spans}
    assert set(spans) == {"generate", "queue", "prefill", "decode"}
    for name, ms in (("queue", receipt.queued_ms), ("prefill", receipt.prefill_ms), ("decode", receipt.decode_ms)):
        assert spans[name].parent_id == spans["generate"].span_id
        assert (spans[name].end - spans[name].start) / 1e6 == pytest.approx(ms, abs=0.01), name
    found = spans["generate"].attributes
    assert found["tandem.engine"] == "test" and found["gen_ai.response.model"] == "fake"
    assert found["tandem.numerics_id"] == receipt.numerics_id
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (20, 16)
    assert found["tandem.outcome"] == "finished" and found["tandem.attempt"] == 1
    assert spans["prefill"].attributes["gen_ai.usage.input_tokens"] == 20
    assert spans["decode"].attributes["tandem.steps"] == receipt.steps


async def test_what_the_cache_held_is_told(receiver: Receiver) -> None:
    async with serve(otlp_endpoint=receiver.endpoint) as server:
        for _ in range(2):
            await server.generate(ask("the same thirty-two characters!!"))
    cold, warm = receiver.named("prefill")
    assert cold.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    assert warm.attributes["gen_ai.usage.cache_read.input_tokens"] > 0


async def test_refused_requests_have_no_phases(receiver: Receiver) -> None:
    async with serve(otlp_endpoint=receiver.endpoint) as server:
        with pytest.raises(TandemError):
            await server.generate(ask(model="gpt-9"))
        server.engine.drain()
        with pytest.raises(TandemError):
            await server.generate(ask())
    assert {span.name for span in receiver.spans} == {"generate"}
    unknown, draining = receiver.spans
    assert unknown.attributes["error.type"] == "MODEL_NOT_FOUND" and not unknown.error
    assert draining.attributes["error.type"] == "ENGINE_DRAINING" and draining.error
    assert draining.attributes["rpc.response.status_code"] == "UNAVAILABLE"


async def test_a_request_that_waits_when_it_ends_has_waited(receiver: Receiver) -> None:
    runner = FakeRunner()
    runner.gate.clear()
    async with serve(runner, max_num_seqs=1, otlp_endpoint=receiver.endpoint) as server:
        running = server.call(ask("one", stop=LONG))
        await running.read()
        waiting = asyncio.create_task(server.generate(ask("two", stop=LONG, timeout_ms=100)))
        await until(lambda: len(server.engine.streams) == 2)
        await asyncio.sleep(0.12)
        runner.gate.set()
        with pytest.raises(TandemError):
            await waiting
        running.cancel()
        await server.idle()
    late = next(span for span in receiver.named("generate") if "error.type" in span.attributes)
    gone = next(span for span in receiver.named("generate") if span is not late)
    assert late.attributes["error.type"] == "DEADLINE" and late.error
    assert [span.name for span in receiver.spans if span.parent_id == late.span_id] == ["queue"]
    assert gone.attributes["tandem.outcome"] == "cancelled" and not gone.error
    assert gone.attributes["rpc.response.status_code"] == "CANCELLED"


async def test_a_step_that_fails_is_an_error(receiver: Receiver) -> None:
    runner = FakeRunner()
    async with serve(runner, otlp_endpoint=receiver.endpoint) as server:
        execute = runner.execute

        def broken(slices: object) -> object:
            raise RuntimeError("no more memory")

        runner.execute = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(TandemError):
            await server.generate(ask())
        runner.execute = execute  # type: ignore[method-assign]
    (span,) = receiver.named("generate")
    assert span.attributes["error.type"] == "INTERNAL" and span.error


async def test_embed_is_a_span(receiver: Receiver) -> None:
    async with serve(otlp_endpoint=receiver.endpoint) as server:
        with pytest.raises(grpc.RpcError):
            await server.inference.Embed(pb.EmbedRequest(request_id="e"))
    span = receiver.one("embed")
    assert span.attributes["error.type"] == "INVALID_FIELD" and span.attributes["tandem.request_id"] == "e"


async def test_without_tracing_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off, a request goes past the null object: no TracedRequest, no trace told to the draft, no queue thread."""

    def never(*_: object) -> None:
        raise AssertionError("made while tracing is off")

    monkeypatch.setattr(TracedRequest, "__init__", never)
    async with serve() as server:
        assert server.process.tracer is NULL_TRACER
        answer = asyncio.create_task(server.generate(ask()))
        await until(lambda: bool(server.engine.streams) or answer.done())
        assert all(stream.request.trace == "" for stream in server.engine.streams.values())
        assert (await answer).ids()
