"""EngineService, model information, embeddings, reflection."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.block_hash import SCHEME, hash_chain
from tandem.engine.v1 import engine_pb2
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.tokenizer import TokenizerBundle
from tests.engine_service.fakes import FakeRunner
from tests.engine_service.server import Server, ask, serve, until


async def load_of(server: Server) -> engine_pb2.WatchLoadResponse:
    return await anext(aiter(server.control.WatchLoad(engine_pb2.WatchLoadRequest())))


def split(joined: bytes) -> list[bytes]:
    return [joined[i : i + 16] for i in range(0, len(joined), 16)]


async def test_load_reports_count_what_happened() -> None:
    async with serve() as server:
        fresh = await load_of(server)
        assert fresh.state == engine_pb2.ENGINE_STATE_READY and not fresh.work_pending
        assert (fresh.sequence, fresh.steps, fresh.kv_blocks_total) == (1, 0, 64)
        await server.generate(ask("sixteen tokens!!"))
        await server.generate(ask("sixteen tokens!!"))
        load = await load_of(server)
        assert load.epoch == server.engine.epoch and load.model.name == "fake"
        assert load.output_tokens == 16 and load.cached_tokens == 15
        assert load.kv_blocks_used == 0 and load.kv_blocks_cached >= 4
        assert load.running == load.waiting == 0 and load.rss_bytes > 0
        assert load.decode_step_ms > 0 and load.prefill_tokens_per_s > 0


async def test_load_interval_is_checked() -> None:
    async with serve() as server:
        with pytest.raises(grpc.RpcError) as caught:
            await anext(aiter(server.control.WatchLoad(engine_pb2.WatchLoadRequest(interval_ms=10))))
        assert TandemError.from_rpc(caught.value).field == "interval_ms"


async def test_kv_events_mirror_the_cache() -> None:
    async with serve(FakeRunner(num_blocks=40), max_model_len=100) as server:
        await server.generate(ask("a prompt of twenty!!"))
        stream = aiter(server.control.SubscribeKvEvents(engine_pb2.SubscribeKvEventsRequest()))
        first = await anext(stream)
        assert first.snapshot.complete and first.snapshot.scheme == SCHEME and first.snapshot.block_size == 4
        held = set(split(first.snapshot.hashes))
        prompt = hash_chain(list(b"a prompt of twenty!!"), 4)
        assert set(prompt) <= held
        number = first.number
        for index in range(8):
            await server.generate(ask(f"other prompt no {index:5}"))
        target = server.engine.loop.scheduler.pool.last_number
        await until(lambda: server.engine.kv_log.number == target)
        while number < target:
            message = await anext(stream)
            assert message.epoch == server.engine.epoch
            assert message.number - len(message.events) == number, "a gap in the numbers"
            number = message.number
            for event in message.events:
                kind = event.WhichOneof("event")
                if kind == "stored":
                    assert not event.stored.parent or len(event.stored.parent) == 16
                    held |= set(split(event.stored.hashes))
                elif kind == "removed":
                    held -= set(split(event.removed.hashes))
        assert held == set(server.engine.loop.scheduler.pool._by_hash)
        # A subscriber that comes back goes on without a snapshot.
        again = await anext(
            aiter(
                server.control.SubscribeKvEvents(
                    engine_pb2.SubscribeKvEventsRequest(epoch=server.engine.epoch, last_number=target - 2)
                )
            )
        )
        assert not again.HasField("snapshot") and (again.number, len(again.events)) == (target, 2)
        other = await anext(
            aiter(
                server.control.SubscribeKvEvents(engine_pb2.SubscribeKvEventsRequest(epoch=1, last_number=target - 2))
            )
        )
        assert other.HasField("snapshot")


async def test_reset_prefix_cache() -> None:
    async with serve() as server:
        await server.generate(ask("remember this one"))
        answer = await server.control.ResetPrefixCache(engine_pb2.ResetPrefixCacheRequest())
        assert answer.removed_blocks >= 4
        assert (await server.generate(ask("remember this one"))).usage.cached_tokens == 0


async def test_model_info_and_tokenizer() -> None:
    async with serve() as server:
        info = (await server.inference.GetModelInfo(pb.GetModelInfoRequest(model="alias"))).model
        assert (info.name, list(info.aliases), info.block_size, info.vocab_size) == ("fake", ["alias"], 4, 258)
        (listed,) = (await server.inference.ListModels(pb.ListModelsRequest())).models
        assert listed == info
        message = await server.inference.GetTokenizer(pb.GetTokenizerRequest())
        assert TokenizerBundle.from_proto(message).digest == info.tokenizer_digest
        with pytest.raises(grpc.RpcError) as caught:
            await server.inference.GetTokenizer(pb.GetTokenizerRequest(model="none"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_embeddings() -> None:
    async with serve() as server:
        request = pb.EmbedRequest(inputs=[pb.TokenIds(ids=[3, 4]), pb.TokenIds(ids=[5])])
        answer = await server.inference.Embed(request)
        assert answer.prompt_tokens == 3 and len(answer.embeddings) == 2
        for vector in answer.embeddings:
            assert np.linalg.norm(vector.values) == pytest.approx(1.0, abs=1e-6)
        request.normalize = False
        answer = await server.inference.Embed(request)
        assert list(answer.embeddings[0].values)[:2] == [7.0, 2.0]
        for bad in ([], [pb.TokenIds()], [pb.TokenIds(ids=[999])], [pb.TokenIds(ids=[1] * 999)]):
            with pytest.raises(grpc.RpcError) as caught:
                await server.inference.Embed(pb.EmbedRequest(inputs=bad))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_reflection_lists_services() -> None:
    async with serve() as server:
        stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"tandem.inference.v1.InferenceService", "tandem.engine.v1.EngineService"} <= names
        await call.done_writing()
