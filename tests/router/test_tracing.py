"""The router's span: its attempts as events, and how a request that moved, failed or was given up ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tests.router.harness import Cluster, Result, cluster, collect, request, until
from tests.router.mock_engine import MockConfig
from tests.tandem.tracing.receiver import Receiver, grpc_receiver

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
METADATA = (("traceparent", PARENT),)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setattr("tandem.tracing.queue.INTERVAL_S", 0.01)
    with grpc_receiver() as made:
        yield made


@contextlib.asynccontextmanager
async def traced(receiver: Receiver, count: int = 2, config: MockConfig | None = None) -> AsyncIterator[Cluster]:
    """A cluster whose router has sent all its spans when this is left."""
    async with cluster(count, config, otlp_endpoint=receiver.endpoint) as made:
        yield made


async def test_the_attempt_tells_engine_reason_and_matched_blocks(receiver: Receiver) -> None:
    prompt = list(range(64))
    async with traced(receiver) as made:
        first = await collect(made.stub, request(prompt, request_id="r1"), metadata=METADATA)
        feeds = [engine.feed for engine in made.router.fleet.engines.values()]
        await until(lambda: any(feed.indexed() >= 4 for feed in feeds))
        await collect(made.stub, request(prompt, request_id="r2"), metadata=METADATA)
    cold, warm = receiver.named("route")
    for span in (cold, warm):
        assert (span.service, span.kind, span.error) == ("tandem-router", "SERVER", False)
        assert span.parent_id == "b7ad6b7169203331"
        assert span.attributes["rpc.system.name"] == "grpc"
        assert span.attributes["rpc.method"] == "tandem.inference.v1.InferenceService/Generate"
        assert span.attributes["rpc.response.status_code"] == "OK"
        assert span.attributes["tandem.outcome"] == "ok" and span.attributes["tandem.attempts"] == 1
        assert span.attributes["gen_ai.request.model"] == "mock"
        assert span.attributes["gen_ai.usage.output_tokens"] == 8
        assert span.attributes["tandem.ttft_ms"] > 0
        attempt = span.event("attempt")
        assert attempt["tandem.engine"] == span.attributes["tandem.engine"] == first.accepted[0].engine
        assert attempt["tandem.route.policy"] == "prefix_exact" and attempt["tandem.route.candidates"] == 2
    assert cold.event("attempt")["tandem.route.matched_blocks"] == 0
    assert warm.event("attempt")["tandem.route.matched_blocks"] == 4
    assert "holds 64 prompt tokens" in warm.event("attempt")["tandem.reason"]
    assert (cold.attributes["tandem.request_id"], warm.attributes["tandem.request_id"]) == ("r1", "r2")


async def test_a_refused_attempt_is_retried_and_told(receiver: Receiver) -> None:
    async with traced(receiver) as made:
        for engine in made.engines:
            engine.config.refuse = [TandemError("ENGINE_FULL", "full")] if engine is made.engines[0] else []
        # Whichever engine is asked first: until the one that refuses has been.
        while made.engines[0].config.refuse:
            await collect(made.stub, request([1, 2, 3]), metadata=METADATA)
    span = next(span for span in receiver.named("route") if any(name == "retry" for name, _ in span.events))
    assert [name for name, _ in span.events] == ["attempt", "retry", "attempt"]
    assert span.event("retry") == {"tandem.lost": made.engines[0].address, "tandem.reason": "ENGINE_FULL"}
    assert span.attributes["tandem.attempts"] == 2 and span.attributes["tandem.outcome"] == "resumed"
    assert span.attributes["tandem.engine"] == made.engines[1].address


async def test_a_lost_engine_is_a_resume(receiver: Receiver) -> None:
    async with traced(receiver, config=MockConfig(step_s=0.01)) as made:
        struck: list[str] = []

        async def strike(result: Result) -> None:
            if not struck and len(result.ids.get(0, ())) >= 3:
                struck.append(result.accepted[0].engine)
                await next(engine for engine in made.engines if engine.address == struck[0]).kill()

        result = await collect(made.stub, request([1, 2, 3], 20), strike, metadata=METADATA)
        assert len(result.ids[0]) == 20
    span = receiver.one("route")
    assert [name for name, _ in span.events] == ["attempt", "resume", "attempt"]
    assert span.event("resume")["tandem.lost"] == struck[0]
    assert [attributes["tandem.attempt"] for name, attributes in span.events if name == "attempt"] == [1, 2]
    assert span.attributes["gen_ai.usage.output_tokens"] == 20 and not span.error


async def test_errors_and_hang_ups(receiver: Receiver) -> None:
    async with traced(receiver, 1, MockConfig(step_s=0.01)) as made:
        made.engines[0].config.refuse = [TandemError("NO_ALLOWED_TOKEN", "none")]
        with pytest.raises(grpc.RpcError):
            await collect(made.stub, request([1]), metadata=METADATA)
        with pytest.raises(grpc.RpcError):
            await collect(made.stub, pb.GenerateRequest(model="mock"), metadata=METADATA)
        made.engines[0].config.refuse = [TandemError("INTERNAL", "broken")]
        with pytest.raises(grpc.RpcError):
            await collect(made.stub, request([1]), metadata=METADATA)
        call = made.stub.Generate(request([2], 1000), metadata=METADATA)
        await call.read()
        call.cancel()
        await until(lambda: made.engines[0].cancelled_calls == 1)
        await asyncio.to_thread(made.router.tracer.close)
    refused, invalid, broken, gone = receiver.named("route")
    assert refused.attributes["error.type"] == "NO_ALLOWED_TOKEN" and not refused.error
    assert refused.attributes["rpc.response.status_code"] == "FAILED_PRECONDITION"
    assert invalid.attributes["error.type"] == "INVALID_FIELD" and not invalid.error
    assert broken.attributes["error.type"] == "INTERNAL" and broken.error
    assert gone.attributes["rpc.response.status_code"] == "CANCELLED" and not gone.error
    assert gone.attributes["tandem.outcome"] == "cancelled"


async def test_a_wait_for_an_engine_is_a_span_of_its_own(receiver: Receiver) -> None:
    async with traced(receiver, 1, MockConfig(step_s=0.01, max_num_seqs=1, max_waiting=0)) as made:
        await asyncio.gather(*(collect(made.stub, request([n], 10), metadata=METADATA) for n in range(3)))
    routes = {span.span_id: span for span in receiver.named("route")}
    waits = receiver.named("queue")
    assert waits and all(wait.parent_id in routes for wait in waits)
    for wait in waits:
        assert routes[wait.parent_id].attributes["tandem.queued_ms"] >= (wait.end - wait.start) / 1e6 - 1


async def test_embed_is_traced_too(receiver: Receiver) -> None:
    async with traced(receiver, 1) as made:
        await made.stub.Embed(pb.EmbedRequest(model="mock", inputs=[pb.TokenIds(ids=[1])]), metadata=METADATA)
        with pytest.raises(grpc.RpcError):
            await made.stub.Embed(pb.EmbedRequest(model="other"), metadata=METADATA)
    good, bad = receiver.named("route")
    assert {span.attributes["rpc.method"].rpartition("/")[2] for span in (good, bad)} == {"Embed"}
    assert good.event("attempt")["tandem.engine"] == made.engines[0].address and not good.error
    assert bad.attributes["error.type"] == "MODEL_NOT_FOUND" and not bad.events
