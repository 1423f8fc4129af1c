"""The way of a request through the router."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tests.router.harness import Result, cluster, collect, request, router_for, until
from tests.router.mock_engine import MockConfig, expected

PROMPT = list(range(100))


async def test_stream_is_the_engines_own() -> None:
    async with cluster(2) as c:
        message = request(PROMPT, 12)
        message.sampling.seed = 7
        result = await collect(c.stub, message)
        assert (result.ids[0], result.text[0]) == expected(PROMPT, 12, seed=7)
        assert [a.seed for a in result.accepted] == [7]
        assert result.usage[0].completion_tokens == 12
        assert result.finished == [0]


async def test_seed_is_drawn_once_and_reported() -> None:
    async with cluster(1) as c:
        one = await collect(c.stub, request(PROMPT, 4))
        two = await collect(c.stub, request(PROMPT, 4))
        assert one.accepted[0].seed != two.accepted[0].seed
        assert one.ids[0] == expected(PROMPT, 4, seed=one.accepted[0].seed)[0]
        assert c.engines[0].calls[0].attempt == 1
        assert c.engines[0].calls[0].request_id


async def test_models_and_tokenizer_come_from_the_fleet() -> None:
    async with cluster(2) as c:
        models = (await c.stub.ListModels(pb.ListModelsRequest())).models
        assert [(m.name, list(m.aliases)) for m in models] == [("mock", ["mock-alias"])]
        assert (await c.stub.GetModelInfo(pb.GetModelInfoRequest(model="mock-alias"))).model.name == "mock"
        assert (await c.stub.GetTokenizer(pb.GetTokenizerRequest(model="mock"))).digest == "tok-1"
        embedded = await c.stub.Embed(pb.EmbedRequest(model="mock", inputs=[pb.TokenIds(ids=[1, 2, 3])]))
        assert embedded.embeddings[0].values == [3.0]
        alias = request(PROMPT, 2)
        alias.model = "mock-alias"
        assert len((await collect(c.stub, alias)).ids[0]) == 2
        alias.model = ""
        assert len((await collect(c.stub, alias)).ids[0]) == 2


async def failure(call: object) -> TandemError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return TandemError.from_rpc(caught.value)


async def test_unknown_model_and_lost_model_differ() -> None:
    async with cluster(1) as c:
        wrong = request(PROMPT)
        wrong.model = "gpt-9"
        error = await failure(collect(c.stub, wrong))
        assert (error.reason, error.code) == ("MODEL_NOT_FOUND", grpc.StatusCode.NOT_FOUND)
        assert error.metadata["served"] == "mock"
        await c.engines[0].kill()
        await until(lambda: not c.engine().connected)
        error = await failure(collect(c.stub, request(PROMPT)))
        assert error.reason == "NO_ENGINE"
        assert error.retry_after_s


async def test_starts_with_zero_engines() -> None:
    async with router_for("") as router, grpc.aio.insecure_channel(router.address) as channel:
        from tandem.inference.v1 import inference_pb2_grpc

        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert not (await stub.ListModels(pb.ListModelsRequest())).models
        error = await failure(collect(stub, request(PROMPT)))
        assert (error.reason, error.code) == ("NO_ENGINE", grpc.StatusCode.UNAVAILABLE)
        assert error.retry_after_s


async def test_client_hang_up_reaches_the_engine_at_once() -> None:
    async with cluster(1, MockConfig(step_s=0.02)) as c:
        call = c.stub.Generate(request(PROMPT, 1000))
        await call.read()
        await call.read()
        assert c.engines[0].running == 1
        call.cancel()
        await until(lambda: c.engines[0].running == 0, 1.0)
        assert c.engines[0].cancelled_calls == 1
        await until(lambda: c.engine().load.in_flight == 0)


async def test_client_gone_in_prefill() -> None:
    async with cluster(1, MockConfig(prefill_s_per_token=0.1)) as c:
        call = c.stub.Generate(request(PROMPT, 10))
        await call.read()
        call.cancel()
        await until(lambda: c.engines[0].running == 0, 1.0)


async def test_engine_errors_pass_unchanged() -> None:
    async with cluster(1) as c:
        c.engines[0].config.refuse.append(TandemError("GRAMMAR", "bad schema", field="json_schema"))
        error = await failure(collect(c.stub, request(PROMPT)))
        assert (error.reason, error.message, error.field) == ("GRAMMAR", "bad schema", "json_schema")
        assert len(c.engines[0].calls) == 1, "an error of the request is not retried"
        assert c.engine().failures == 0, "and is not held against the engine"


async def test_impossible_requests_are_refused_before_they_queue() -> None:
    async with cluster(2, MockConfig(max_model_len=120, blocks=7)) as c:
        error = await failure(collect(c.stub, request(PROMPT, 21)))
        assert error.reason == "CONTEXT_LENGTH"
        assert error.metadata == {"prompt_tokens": "100", "max_tokens": "21", "max_model_len": "120"}
        error = await failure(collect(c.stub, request(PROMPT, 20)))
        assert (error.reason, error.metadata["pool_blocks"]) == ("NEVER_FITS", "7")
        assert not c.engines[0].calls and not c.engines[1].calls


async def test_malformed_requests() -> None:
    async with cluster(1) as c:
        assert (await failure(collect(c.stub, pb.GenerateRequest(model="mock")))).field == "prompt"
        assert (await failure(collect(c.stub, request(PROMPT, request_id="x" * 300)))).field == "request_id"


async def test_deadlines_at_each_hop() -> None:
    async with cluster(1, MockConfig(step_s=0.05, max_num_seqs=1, max_waiting=0)) as c:
        # While the engine works:
        error = await failure(collect(c.stub, request(PROMPT, 1000, timeout_ms=300)))
        assert error.reason == "DEADLINE"
        assert 0 < c.engines[0].calls[0].timeout_ms <= 300
        await until(lambda: c.engines[0].running == 0)
        # In the queue:
        long = asyncio.create_task(collect(c.stub, request(PROMPT, 1000)))
        await until(lambda: c.engines[0].running == 1)
        await asyncio.sleep(0.1)
        error = await failure(collect(c.stub, request(PROMPT, 4, timeout_ms=200)))
        assert error.reason == "DEADLINE"
        assert len(c.router.inference.admission) == 0
        long.cancel()


async def test_slow_reader_gets_everything_in_few_messages() -> None:
    async with cluster(1, MockConfig(step_s=0.0)) as c:
        message = request(PROMPT, 3000)
        message.output.logprobs = 1
        call = c.stub.Generate(message)
        result = Result()
        result.take(await call.read())
        await asyncio.sleep(1.0)
        while (response := await call.read()) is not grpc.aio.EOF:
            result.take(response)
        assert len(result.ids[0]) == 3000
        assert result.ids[0] == expected(PROMPT, 3000, seed=result.accepted[0].seed)[0]


async def test_text_prompts_are_routed_by_load() -> None:
    async with cluster(2) as c:
        message = pb.GenerateRequest(model="mock", text="hello")
        message.stop.max_tokens = 3
        assert len((await collect(c.stub, message)).ids[0]) == 3
