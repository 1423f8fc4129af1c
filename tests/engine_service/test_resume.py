"""A broken stream, gone on with on another engine, is the same stream."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tests.engine_service.fakes import FakeRunner, scripted
from tests.engine_service.server import Answer, ask, serve

SAY = "naïve 🦊 says abcabdabcabc. End"


def runner() -> FakeRunner:
    return FakeRunner(next_token=scripted(SAY, prompt_len=5), max_model_len=200)


def reached(answer: Answer, deltas: int, choice: int = 0) -> tuple[list[int], str]:
    """What a client had after so many deltas."""
    seen = answer.deltas(choice)[:deltas]
    return [token for delta in seen for token in delta.ids], "".join(delta.text for delta in seen)


def resumed(request: pb.GenerateRequest, ids: Sequence[int], text: str, prompt_tokens: int = 5) -> pb.GenerateRequest:
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    copy.resume.prompt_tokens = prompt_tokens
    copy.resume.choices.add(index=0, emitted_ids=ids, text_bytes_sent=len(text.encode()))
    return copy


@pytest.mark.parametrize(
    "stop",
    [
        pb.StopConditions(max_tokens=100),
        pb.StopConditions(max_tokens=20),
        pb.StopConditions(max_tokens=100, stop=["abcabc"]),
        pb.StopConditions(max_tokens=100, stop=["abcabc", ". E"], include_stop_str_in_output=True),
        pb.StopConditions(max_tokens=100, stop_token_ids=[ord(".")]),
    ],
    ids=["eos", "length", "string", "included", "id"],
)
async def test_resume_at_every_point_equals_the_whole(stop: pb.StopConditions) -> None:
    async with serve(runner()) as first, serve(runner()) as second:
        request = ask(stop=stop, output=pb.OutputOptions(logprobs=0))
        whole = (await first.generate(request)).check()
        for cut in range(len(whole.deltas()) + 1):
            ids, text = reached(whole, cut)
            rest = await second.generate(resumed(request, ids, text))
            rest.check(tokens=len(ids), text_bytes=len(text.encode()))
            assert ids + rest.ids() == whole.ids()
            assert text + rest.text() == whole.text()
            assert rest.finished() == whole.finished()
            assert rest.usage.completion_tokens == whole.usage.completion_tokens
            assert rest.usage.prompt_tokens == 5


async def test_sampled_choices_go_on_with_their_own_noise() -> None:
    async with serve() as first, serve() as second:
        request = ask("a prompt", n=3, sampling=pb.SamplingParams(temperature=1.0, seed=3))
        whole = await first.generate(request)
        copy = pb.GenerateRequest()
        copy.CopyFrom(request)
        copy.resume.prompt_tokens = 8
        copy.resume.choices.add(
            index=0, emitted_ids=whole.ids(0), text_bytes_sent=len(whole.text(0).encode()), finished=True
        )
        ids, text = reached(whole, 4, choice=2)
        copy.resume.choices.add(index=2, emitted_ids=ids, text_bytes_sent=len(text.encode()))
        rest = await second.generate(copy)
        assert rest.ids(0) == [] and rest.ids(1) == whole.ids(1)
        assert ids + rest.ids(2) == whole.ids(2)
        assert sum(event.HasField("finished") for event in rest.events) == 2
        assert rest.usage.completion_tokens == whole.usage.completion_tokens


async def test_all_finished_needs_no_step() -> None:
    async with serve(runner()) as server:
        request = resumed(ask(), [*b"na"], "na")
        request.resume.choices[0].finished = True
        answer = await server.generate(request)
        assert answer.kinds == ["accepted", "usage"] and answer.usage.completion_tokens == 2
        assert server.runner.steps == 0
        await server.idle()


async def test_another_numerics_id_is_told() -> None:
    async with serve() as server:
        request = resumed(ask(), [1], "\x01")
        assert (await server.generate(request)).accepted.exact_resume
        request.resume.numerics_id = "other"
        assert not (await server.generate(request)).accepted.exact_resume


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("resume.prompt_tokens", lambda r: setattr(r.resume, "prompt_tokens", 4)),
        ("resume.choices.index", lambda r: setattr(r.resume.choices[0], "index", 1)),
        ("resume.choices.emitted_ids", lambda r: r.resume.choices[0].emitted_ids.append(9999)),
        ("resume.choices.emitted_ids", lambda r: r.resume.choices[0].emitted_ids.extend([1] * 100)),
        ("resume.choices[0].text_bytes_sent", lambda r: setattr(r.resume.choices[0], "text_bytes_sent", 99)),
        ("resume.choices[0].text_bytes_sent", lambda r: setattr(r.resume.choices[0], "text_bytes_sent", 3)),
        ("resume.choices[0].emitted_ids", lambda r: r.resume.choices[0].emitted_ids.extend([256, 1])),
    ],
)
async def test_contradictions_are_refused(field: str, change: object) -> None:
    async with serve(runner()) as server:
        request = resumed(ask(), [*"naï".encode()], "na")
        change(request)  # type: ignore[operator]
        with pytest.raises(TandemError) as caught:
            await server.generate(request)
        assert caught.value.reason == "INVALID_FIELD" and caught.value.field == field
