"""The default model behind the real server: scores, choices, grammar and embeddings, end to end over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from engine_service.process import Process
from engine_service.settings import EngineSettings
from tandem import rpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tests.engine_service.server import Answer, ask

PROMPT = "The capital of France is"


@contextlib.asynccontextmanager
async def real(**settings: object) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
    with tempfile.TemporaryDirectory(prefix="tdm", dir="/tmp") as folder:
        listen = f"unix:{Path(folder) / 'e'}"
        options = EngineSettings(
            listen=listen,
            threads=1,
            kv_cache_bytes=64 << 20,
            max_num_seqs=8,
            **settings,  # type: ignore[arg-type]
        )
        process = Process(options)
        await process.start()
        await process.load()
        channel = rpc.channel(listen)
        try:
            yield inference_pb2_grpc.InferenceServiceStub(channel)
        finally:
            await channel.close()
            await process.stop()


async def collect(stub: inference_pb2_grpc.InferenceServiceStub, request: pb.GenerateRequest) -> Answer:
    answer = Answer()
    async for response in stub.Generate(request):
        answer.events.extend(response.events)
    return answer.check()


def scores(answer: Answer) -> list[pb.TokenLogprob]:
    (found,) = [event.prompt for event in answer.events if event.HasField("prompt")]
    return list(found.tokens)


async def embed(stub: inference_pb2_grpc.InferenceServiceStub, *texts: list[int], pooling: int = 0) -> np.ndarray:
    request = pb.EmbedRequest(inputs=[pb.TokenIds(ids=ids) for ids in texts], pooling=pooling)  # type: ignore[arg-type]
    answer = await stub.Embed(request)
    assert answer.prompt_tokens == sum(map(len, texts))
    return np.array([list(vector.values) for vector in answer.embeddings], np.float32)


async def check_scores(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """What was sampled has, read as a prompt, the same logprobs bit by bit; so echo tells the truth."""
    said = await collect(
        stub, ask(PROMPT, stop=pb.StopConditions(max_tokens=6), output=pb.OutputOptions(logprobs=3, prompt_logprobs=3))
    )
    prompt, ids = [token.id for token in scores(said)], said.ids()
    sampled = [token for delta in said.deltas() for token in delta.logprobs]
    assert "Paris" in said.text()
    read = await collect(
        stub,
        ask(
            token_ids=pb.TokenIds(ids=[*prompt, *ids]),
            stop=pb.StopConditions(max_tokens=0),
            output=pb.OutputOptions(prompt_logprobs=3),
        ),
    )
    again = scores(read)
    assert [token.id for token in again] == [*prompt, *ids] and not read.ids()
    assert not again[0].HasField("logprob")
    assert again[1 : len(prompt)] == scores(said)[1:]
    for echoed, first in zip(again[len(prompt) :], sampled, strict=True):
        assert (echoed.id, echoed.logprob, echoed.rank) == (first.id, first.logprob, 1)
        assert list(echoed.top_ids) == list(first.top_ids) and list(echoed.top_logprobs) == list(first.top_logprobs)


async def check_choices(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    """Choices differ, repeat with their seed, and prefill once."""
    request = ask(
        "Once upon a time",
        sampling=pb.SamplingParams(temperature=1.0, seed=7),
        stop=pb.StopConditions(max_tokens=8, ignore_eos=True),
        n=3,
    )
    first, second = await collect(stub, request), await collect(stub, request)
    texts = [first.text(choice) for choice in range(3)]
    assert len(set(texts)) == 3 and texts == [second.text(choice) for choice in range(3)]
    assert first.usage.completion_tokens == 24


async def check_grammar(stub: inference_pb2_grpc.InferenceServiceStub) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "year": {"type": "integer", "maximum": 9999}},
        "required": ["city", "year"],
        "additionalProperties": False,
    }
    answer = await collect(
        stub,
        ask(
            PROMPT,
            stop=pb.StopConditions(max_tokens=40),
            structured=pb.StructuredOutput(json_schema=json.dumps(schema)),
        ),
    )
    assert json.loads(answer.text())["city"] in ("Paris", "Rome")


async def check_embeddings(stub: inference_pb2_grpc.InferenceServiceStub, tokens: list[list[int]]) -> None:
    cat, kitten, tax = await embed(stub, *tokens)
    assert np.allclose([np.linalg.norm(vector) for vector in (cat, kitten, tax)], 1, atol=1e-5)
    assert cat @ kitten > cat @ tax
    (alone,) = await embed(stub, tokens[1])
    assert np.array_equal(alone, kitten), "whoever else is embedded changes no bit"
    (last,) = await embed(stub, tokens[1], pooling=pb.POOLING_LAST)
    assert not np.allclose(last, kitten)


async def prompt_ids(stub: inference_pb2_grpc.InferenceServiceStub, text: str) -> list[int]:
    answer = await collect(
        stub, ask(text, stop=pb.StopConditions(max_tokens=0), output=pb.OutputOptions(prompt_logprobs=0))
    )
    return [token.id for token in scores(answer)]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
async def test_scores_choices_grammar_and_embeddings(kv_dtype: str) -> None:
    if kv_dtype == "int8":
        cpu = pytest.importorskip("kernels.cpu")
        if not cpu.available():
            pytest.skip(cpu.reason())
    async with real(kv_dtype=kv_dtype) as stub:
        texts = ("A cat sleeps on the sofa.", "A kitten naps on the couch.", "Quarterly tax returns are due in April.")
        tokens = [await prompt_ids(stub, text) for text in texts]
        # All at once: they are each other's batch mates.
        await asyncio.gather(
            check_scores(stub), check_choices(stub), check_grammar(stub), check_embeddings(stub, tokens)
        )
