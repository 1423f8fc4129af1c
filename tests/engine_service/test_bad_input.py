"""Bad values are refused by name, and leave no trace in the engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import grpc
import pytest

from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tests.engine_service.server import Server, ask

Change = Callable[[pb.GenerateRequest], object]

NAN, INF = math.nan, math.inf


def sampling(**fields: object) -> Change:
    return lambda r: r.sampling.MergeFrom(pb.SamplingParams(**fields))  # type: ignore[arg-type]


def stop(**fields: object) -> Change:
    return lambda r: r.stop.MergeFrom(pb.StopConditions(**fields))  # type: ignore[arg-type]


def output(**fields: object) -> Change:
    return lambda r: r.output.MergeFrom(pb.OutputOptions(**fields))  # type: ignore[arg-type]


def structured(**fields: object) -> Change:
    return lambda r: r.structured.CopyFrom(pb.StructuredOutput(**fields))  # type: ignore[arg-type]


def top(**fields: object) -> Change:
    return lambda r: r.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]


def prompt_of(ids: list[int]) -> Change:
    return lambda r: r.token_ids.CopyFrom(pb.TokenIds(ids=ids))


CASES: list[tuple[str, Change]] = [
    *[("sampling.temperature", sampling(temperature=value)) for value in (-0.1, 2.1, NAN, INF, -INF)],
    *[("sampling.top_p", sampling(top_p=value)) for value in (0.0, -1.0, 1.01, NAN)],
    *[("sampling.min_p", sampling(min_p=value)) for value in (-0.1, 1.1, NAN)],
    *[("sampling.repetition_penalty", sampling(repetition_penalty=value)) for value in (0.0, -1.0, NAN, INF)],
    *[("sampling.frequency_penalty", sampling(frequency_penalty=value)) for value in (-2.1, 2.1, NAN)],
    *[("sampling.presence_penalty", sampling(presence_penalty=value)) for value in (-2.1, 2.1, NAN)],
    ("sampling.logit_bias", sampling(logit_bias={258: 1.0})),
    *[("sampling.logit_bias[5]", sampling(logit_bias={5: value})) for value in (100.5, -101.0, NAN, INF)],
    ("sampling.allowed_token_ids", sampling(allowed_token_ids=[1, 4_000_000_000])),
    ("sampling.bad_words", sampling(bad_words=[pb.TokenIds(ids=[258])])),
    ("sampling.bad_words", sampling(bad_words=[pb.TokenIds()])),
    ("sampling.bad_words", sampling(bad_words=[pb.TokenIds(ids=[1] * 65)])),
    ("sampling.bad_words", sampling(bad_words=[pb.TokenIds(ids=[1])] * 1025)),
    ("stop.min_tokens", stop(min_tokens=9)),
    ("stop.stop", stop(stop=[""])),
    ("stop.stop", stop(stop=["x" * 1025])),
    ("stop.stop", stop(stop=["a"] * 65)),
    ("stop.stop_token_ids", stop(stop_token_ids=[258])),
    ("output.logprobs", output(logprobs=21)),
    ("output.prompt_logprobs", output(prompt_logprobs=21)),
    ("n", top(n=0)),
    ("n", top(n=9)),
    ("truncate_prompt_tokens", top(truncate_prompt_tokens=0)),
    ("truncate_prompt_tokens", top(truncate_prompt_tokens=129)),
    ("request_id", top(request_id="r" * 257)),
    ("cache_salt", top(cache_salt="é" * 129)),
    ("tenant", top(tenant="t" * 257)),
    ("token_ids", prompt_of([])),
    ("token_ids", prompt_of([1, 258])),
    ("text", top(text="")),
    ("prompt", lambda r: r.ClearField("text")),
    ("structured", lambda r: r.structured.SetInParent()),
    ("structured.json_object", structured(json_object=False)),
    ("structured.regex", structured(regex="")),
    ("structured.choice.options", structured(choice=pb.ChoiceList())),
    ("structured.choice.options", structured(choice=pb.ChoiceList(options=["a", ""]))),
]


def state_of(server: Server) -> tuple[object, ...]:
    scheduler, stats = server.engine.loop.scheduler, server.engine.stats
    return (
        len(scheduler.requests),
        len(scheduler.running),
        len(scheduler.waiting),
        scheduler.pool.num_used,
        scheduler.pool.num_cached,
        scheduler.pool.last_number,
        stats.queued,
        stats.steps,
        stats.output_tokens,
        len(server.engine.streams),
        server.runner.steps,
    )


@pytest.mark.parametrize(("field", "change"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
async def test_each_field_is_named(shared: Server, field: str, change: Change) -> None:
    request = ask()
    change(request)
    with pytest.raises(TandemError) as caught:
        await shared.generate(request)
    assert caught.value.reason == "INVALID_FIELD" and caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.field == field


async def test_too_long_names_all_numbers(shared: Server) -> None:
    for request in (
        ask("x" * 100, stop=pb.StopConditions(max_tokens=29)),
        ask("x" * 128, stop=pb.StopConditions()),
        ask("x" * 500),
        ask("x", stop=pb.StopConditions(max_tokens=4_000_000_000)),
    ):
        with pytest.raises(TandemError) as caught:
            await shared.generate(request)
        error = caught.value
        assert error.reason == "CONTEXT_LENGTH" and error.metadata["max_model_len"] == "128"
        assert error.metadata["prompt_tokens"] == str(len(request.text))


async def test_a_thousand_bad_requests_change_nothing(shared: Server) -> None:
    await shared.generate(ask("warm"))
    before = state_of(shared)

    async def one(index: int) -> None:
        request = ask(f"number {index}")
        CASES[index % len(CASES)][1](request)
        with pytest.raises(TandemError) as caught:
            await shared.generate(request)
        assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT

    for start in range(0, 1000, 50):
        await asyncio.gather(*(one(index) for index in range(start, start + 50)))
    assert state_of(shared) == before
    assert (await shared.generate(ask("warm"))).ids()


async def test_never_fits_is_refused_at_arrival() -> None:
    from engine_service.admission import check_fits
    from engine_service.engine import context_limit
    from tandem.lm.block_pool import BlockPool

    with pytest.raises(TandemError) as caught:
        check_fits(30, 12, BlockPool(10, 4))
    assert caught.value.reason == "NEVER_FITS" and caught.value.metadata == {"need_blocks": "11", "pool_blocks": "10"}
    check_fits(30, 11, BlockPool(10, 4))
    with pytest.raises(ValueError, match="raise kv_cache_bytes"):
        context_limit(41, 100, 40)
    assert context_limit(0, 100, 40) == 40 and context_limit(0, 30, 40) == 30
