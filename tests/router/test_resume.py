"""The helper that turns forwarded bytes into a ResumeState."""

from __future__ import annotations

import pytest

from tandem.inference.v1 import inference_pb2 as pb
from tandem.resume import BrokenStreamError, build_resume, read_progress, split_events


def accepted(seed: int = 9) -> bytes:
    event = pb.GenerateEvent(accepted=pb.Accepted(seed=seed, prompt_tokens=3, numerics_id="num"))
    return pb.GenerateResponse(events=[event]).SerializeToString()


def delta(choice: int, offset: int, ids: list[int], text: str = "", at: int = 0) -> bytes:
    event = pb.GenerateEvent(delta=pb.Delta(choice=choice, token_offset=offset, ids=ids, text=text, text_offset=at))
    return pb.GenerateResponse(events=[event]).SerializeToString()


def finished(choice: int) -> bytes:
    return pb.GenerateResponse(events=[pb.GenerateEvent(finished=pb.Finished(choice=choice))]).SerializeToString()


USAGE = pb.GenerateResponse(events=[pb.GenerateEvent(usage=pb.Usage(prompt_tokens=3))]).SerializeToString()
REQUEST = pb.GenerateRequest(model="m", token_ids=pb.TokenIds(ids=[1, 2, 3]), n=3)


def test_state_per_choice() -> None:
    sent = [
        accepted(),
        delta(0, 0, [10, 11], "né", 0),
        delta(1, 0, [20], "", 0),
        delta(1, 1, [21], "漢", 0),
        finished(0),
    ]
    again = build_resume(REQUEST, sent)
    assert again is not None
    assert again.attempt == 2
    assert again.sampling.seed == 9
    assert again.resume == pb.ResumeState(
        prompt_tokens=3,
        numerics_id="num",
        choices=[
            pb.ResumeChoice(index=0, emitted_ids=[10, 11], text_bytes_sent=3, finished=True),
            pb.ResumeChoice(index=1, emitted_ids=[20, 21], text_bytes_sent=3),
        ],
    )
    assert again.token_ids == REQUEST.token_ids and again.n == 3


def test_coalesced_bytes_are_the_same() -> None:
    parts = [accepted(), delta(0, 0, [1], "a", 0), delta(0, 1, [2], "b", 1)]
    assert build_resume(REQUEST, parts) == build_resume(REQUEST, [b"".join(parts)])


def test_second_resume_builds_on_the_first() -> None:
    once = build_resume(REQUEST, [accepted(), delta(0, 0, [1, 2], "ab", 0), finished(1)])
    assert once is not None
    # Either what the new attempt sent alone, as a gateway sees it, with the first resume in the request:
    twice = build_resume(once, [accepted(), delta(0, 2, [3], "c", 2)])
    assert twice is not None and twice.attempt == 3
    assert [(c.index, list(c.emitted_ids), c.text_bytes_sent, c.finished) for c in twice.resume.choices] == [
        (0, [1, 2, 3], 3, False),
        (1, [], 0, True),
    ]
    # Or everything since the start, with the original request, as a router does:
    assert build_resume(REQUEST, [accepted(), delta(0, 0, [1, 2], "ab", 0), finished(1), delta(0, 2, [3], "c", 2)])


def test_nothing_sent_is_a_plain_retry() -> None:
    again = build_resume(REQUEST, [])
    assert again is not None
    assert not again.HasField("resume")
    assert not again.sampling.HasField("seed")
    assert again.attempt == 2


def test_complete_stream_needs_nothing() -> None:
    assert build_resume(REQUEST, [accepted(), delta(0, 0, [1]), finished(0), USAGE]) is None


@pytest.mark.parametrize(
    "parts",
    [
        [delta(0, 1, [5])],
        [delta(0, 0, [5]), delta(0, 0, [5])],
        [delta(0, 0, [5], "ab", 0), delta(0, 1, [6], "c", 1)],
        [b"\xff\xff"],
    ],
)
def test_gaps_and_repeats_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(BrokenStreamError):
        read_progress(REQUEST, parts)


def test_split_finds_events_without_parsing() -> None:
    big = delta(0, 0, list(range(300)), "x" * 500)
    data = accepted() + big + finished(0) + USAGE
    found = split_events(data)
    assert [kind for kind, _, _ in found] == ["accepted", "delta", "finished", "usage"]
    assert data[found[1][1] : found[1][2]] == big
    assert b"".join(data[start:end] for _, start, end in found) == data
    # An unknown field of a later version is skipped.
    assert split_events(b"\x12\x01\x00" + USAGE)[0][0] == "usage"
    for cut in (1, 5, len(data) - 1):
        with pytest.raises(BrokenStreamError):
            split_events(data[:cut])
