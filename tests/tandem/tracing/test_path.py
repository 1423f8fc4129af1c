"""One request over all services, real ones but for the model: one trace, with each span below the right one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from draft_service.service import DraftServicer
from draft_service.session import Limits
from draft_service.settings import DraftSettings
from tandem import rpc
from tandem.draft.v1 import draft_pb2_grpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.lm.proposers import NgramProposer
from tandem.tracing import open_tracer
from tests.engine_service.server import Server, serve, until
from tests.engine_service.speculation.test_engine import PHRASE, controller, fake
from tests.gateway.conftest import RunningGateway
from tests.router.harness import router_for
from tests.tandem.tracing.receiver import Received, Receiver, grpc_receiver

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with grpc_receiver() as made:
        yield made


@contextlib.asynccontextmanager
async def draft(path: Path, endpoint: str) -> AsyncIterator[None]:
    settings = DraftSettings(listen=f"unix:{path}", otlp_endpoint=endpoint)
    tracer = open_tracer(settings, "draft")
    servicer = DraftServicer(NgramProposer((6, 4, 3, 2)), ("ngram",), 7, Limits(), tracer=tracer)
    server, _ = rpc.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)
    server.add_insecure_port(settings.listen)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0.2)
        await asyncio.to_thread(tracer.close)


@contextlib.asynccontextmanager
async def stack(folder: Path, endpoint: str, ratio: float = 1.0) -> AsyncIterator[tuple[RunningGateway, Server]]:
    """Gateway, router, engine and draft, each with a tracer of its own. Leaving it sends what waits."""
    async with draft(folder / "d.sock", endpoint):
        speculation = await asyncio.to_thread(controller, folder / "d.sock")
        async with (
            serve(fake(0.001), speculation, otlp_endpoint=endpoint) as engine,
            router_for(engine.process._settings.listen, otlp_endpoint=endpoint) as router,
        ):
            await until(lambda: bool(router.fleet.models()) and speculation._client.connected)
            gateway = await asyncio.to_thread(
                lambda: RunningGateway(router=router.address, otlp_endpoint=endpoint, trace_sample_ratio=ratio)
            )
            try:
                yield gateway, engine
            finally:
                await asyncio.to_thread(gateway.stop)


def client(gateway: RunningGateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False)


BODY = {"model": "fake", "prompt": PHRASE, "max_tokens": 60, "temperature": 0, "top_p": 0.9, "seed": 3}


def check_tree(receiver: Receiver) -> dict[str, Received]:
    """Names, services, kinds and parents; every span lies within its parent. Returns the spans by name."""
    spans = {span.name: span for span in receiver.spans}
    expected = {
        "POST /v1/completions": ("tandem-gateway", "SERVER", None),
        "route": ("tandem-router", "SERVER", "POST /v1/completions"),
        "generate": ("tandem-engine", "SERVER", "route"),
        "queue": ("tandem-engine", "INTERNAL", "generate"),
        "prefill": ("tandem-engine", "INTERNAL", "generate"),
        "decode": ("tandem-engine", "INTERNAL", "generate"),
        "draft": ("tandem-engine", "CLIENT", "generate"),
        "propose": ("tandem-draft", "SERVER", "draft"),
    }
    engine_spans = [span for span in receiver.spans if not (span.service == "tandem-router" and span.name == "queue")]
    assert sorted(span.name for span in engine_spans) == sorted(expected)
    for name, (service, kind, parent) in expected.items():
        span = next(span for span in engine_spans if span.name == name)
        assert (span.service, span.kind) == (service, kind), name
        assert span.trace_id == TRACE
        assert span.parent_id == (spans[parent].span_id if parent else PARENT), name
        assert span.start <= span.end
        if parent:
            # One clock here: all services run on this machine. The engine asks ahead, also after the last token.
            assert spans[parent].start <= span.start, name
            assert span.end <= spans[parent].end or name == "propose", name
    return {span.name: span for span in engine_spans}


@pytest.mark.parametrize("stream", [False, True])
async def test_one_request_is_one_trace_over_all_services(receiver: Receiver, short_dir: Path, stream: bool) -> None:
    async with stack(short_dir, receiver.endpoint) as (gateway, _), client(gateway) as http:
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "x-request-id": "req-1"}
        answer = await http.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers)
        assert answer.status_code == 200, answer.text
    spans = check_tree(receiver)
    assert {span.trace_state for span in receiver.spans if span.name != "propose"} == {"vendor=1"}
    assert {span.schema_url for span in receiver.spans} == {"https://opentelemetry.io/schemas/1.44.0"}
    assert not any(span.error for span in receiver.spans)
    for name in ("POST /v1/completions", "route", "generate"):
        assert spans[name].attributes["tandem.request_id"] == "req-1"
        assert spans[name].attributes["gen_ai.usage.input_tokens"] == len(PHRASE)
        assert spans[name].attributes["gen_ai.usage.output_tokens"] == 60
    # The phases follow each other, and the draft's numbers agree.
    assert spans["queue"].end == spans["prefill"].start and spans["prefill"].end == spans["decode"].start
    verified = spans["draft"].attributes
    assert 0 < verified["tandem.draft.accepted_tokens"] <= verified["tandem.draft.proposed_tokens"]
    assert verified["tandem.draft.accepted_tokens.ngram"] == verified["tandem.draft.accepted_tokens"]
    told = spans["propose"].attributes
    # That a sequence is gone may be told with the next question, which never came.
    assert told["tandem.draft.questions"] > 0 and told["tandem.outcome"] in ("finished", "disconnected")
    assert told["tandem.draft.proposed_tokens"] >= verified["tandem.draft.accepted_tokens"]


async def test_no_span_holds_text_of_prompt_or_output(receiver: Receiver, short_dir: Path) -> None:
    async with stack(short_dir, receiver.endpoint) as (gateway, _), client(gateway) as http:
        body = {**BODY, "stop": ["SECRET-STOP"], "user": "SECRET-USER"}
        answer = await http.post("/v1/completions", json=body)
        refused = await http.post("/v1/completions", json={**body, "max_tokens": 10**6})
        assert (answer.status_code, refused.status_code) == (200, 400)
    sent = b"".join(receiver.raw)
    assert b"generate" in sent
    words = [word.encode() for word in (*PHRASE.split(), *answer.json()["choices"][0]["text"].split()) if len(word) > 3]
    for secret in (*words, b"SECRET"):
        assert secret not in sent


async def test_what_the_caller_does_not_sample_nobody_records(receiver: Receiver, short_dir: Path) -> None:
    async with stack(short_dir, receiver.endpoint) as (gateway, engine), client(gateway) as http:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert (await http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        # A ratio of 1, but the parent has decided.
        assert (await engine.generate(pb.GenerateRequest(text="a", stop=pb.StopConditions(max_tokens=2)))).ids()
    assert [span.name for span in receiver.spans if span.trace_id == TRACE] == []
    assert receiver.named("generate")


async def test_a_ratio_of_zero_traces_only_what_callers_ask_for(receiver: Receiver, short_dir: Path) -> None:
    async with stack(short_dir, receiver.endpoint, ratio=0.0) as (gateway, _), client(gateway) as http:
        for _ in range(5):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        await http.post("/v1/completions", json=BODY, headers={"traceparent": TRACEPARENT})
    # The engine alone would sample all: it follows the gateway's decision.
    assert {span.trace_id for span in receiver.spans} == {TRACE}
    check_tree(receiver)


@pytest.mark.parametrize("target", ["router", "engine"])
async def test_a_grpc_client_may_start_the_trace(receiver: Receiver, short_dir: Path, target: str) -> None:
    async with (
        serve(fake(), otlp_endpoint=receiver.endpoint) as engine,
        router_for(engine.process._settings.listen, otlp_endpoint=receiver.endpoint) as router,
    ):
        await until(lambda: bool(router.fleet.models()))
        address = router.address if target == "router" else engine.process._settings.listen
        async with rpc.channel(address) as channel:
            call = channel.unary_stream(
                "/tandem.inference.v1.InferenceService/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            request = pb.GenerateRequest(text="hello", stop=pb.StopConditions(max_tokens=3))
            async for _ in call(request, metadata=(("traceparent", TRACEPARENT),)):
                pass
    generate = receiver.one("generate")
    assert generate.trace_id == TRACE
    assert generate.parent_id == (receiver.one("route").span_id if target == "router" else PARENT)
    assert generate.attributes["rpc.method"] == "tandem.inference.v1.InferenceService/Generate"
    assert generate.attributes["rpc.response.status_code"] == grpc.StatusCode.OK.name
    # Nobody proposes drafts to this engine.
    assert not receiver.named("draft")


async def test_a_dead_collector_breaks_no_request(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.tracing.queue.CLOSE_S", 0.1)
    async with stack(short_dir, "http://127.0.0.1:9") as (gateway, _), client(gateway) as http:
        for _ in range(3):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
