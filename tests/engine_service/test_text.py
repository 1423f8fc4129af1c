"""Stop strings and text, against the plain definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.outbox import Outbox, merge_delta
from engine_service.output import ChoiceOutput, ChoiceUpdate
from engine_service.text import Finish, StopRules
from tandem.inference.v1 import inference_pb2 as pb
from tests.engine_service.harness import TOKENIZER

LETTERS = st.text(alphabet="abé", max_size=30)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4)


def plain(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that ends first, of those the longest, ends the text before (or after) itself."""
    found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _length, stop = min(found)
    return (text[:end] if include else text[: end - len(stop)]), stop


@given(text=LETTERS, stops=STOPS, include=st.booleans())
@settings(max_examples=400, deadline=None)
def test_stop_strings_equal_the_definition(text: str, stops: list[str], include: bool) -> None:
    stream = StopRules(stops=tuple(stops), include=include).text_stream(TOKENIZER)
    shown, matched = "", None
    for count, token in enumerate(text.encode(), start=1):
        piece, matched = stream.push(token, count)
        shown += piece
        if matched is not None:
            break
        if not include:
            # Nothing was shown that a stop string could still take back.
            assert plain(text, stops, include)[0].startswith(shown)
    if matched is None:
        shown += stream.end()
    assert (shown, matched) == plain(text, stops, include)


@given(text=st.text(max_size=40))
@settings(deadline=None)
def test_text_without_stops_is_the_decoded_text(text: str) -> None:
    stream = StopRules().text_stream(TOKENIZER)
    pieces = [stream.push(token, 0)[0] for token in text.encode()]
    assert "".join(pieces) + stream.end() == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_many_hostile_stop_strings_are_cheap() -> None:
    stops = tuple("a" * 1000 + f"{index}" for index in range(64))
    stream = StopRules(stops=stops).text_stream(TOKENIZER)
    for count in range(2000):
        stream.push(ord("a"), count)
    assert len(stream._pending) <= 1001


def test_outbox_joins_what_nobody_read() -> None:
    outbox = Outbox(100_000)
    output = ChoiceOutput(0, StopRules(), TOKENIZER, final_only=False)
    for index, letter in enumerate(b"abc"):
        finish = Finish("length") if index == 2 else None
        for event in output.events(ChoiceUpdate(0, [letter], None, index % 2, None, finish)):
            outbox.put(event)
    kinds = [event.WhichOneof("event") for event in outbox._events]
    assert kinds == ["delta", "finished"]
    delta = outbox._events[0].delta
    assert delta.text == "abc" and list(delta.ids) == [*b"abc"] and delta.drafted == 0b010


def test_single_tokens_are_never_joined() -> None:
    outbox = Outbox(100_000, merge=False)
    output = ChoiceOutput(0, StopRules(), TOKENIZER, final_only=False, single_tokens=True)
    for event in output.events(ChoiceUpdate(0, [*b"abc"], None, 0b11, None, Finish("length"))):
        outbox.put(event)
    deltas = [event.delta for event in outbox._events if event.WhichOneof("event") == "delta"]
    assert [(list(delta.ids), delta.text, delta.token_offset, delta.drafted) for delta in deltas] == [
        ([ord("a")], "a", 0, 1),
        ([ord("b")], "b", 1, 1),
        ([ord("c")], "c", 2, 0),
    ]
    assert outbox._events[-1].WhichOneof("event") == "finished"


def test_drafted_bits_end_with_sixty_four() -> None:
    first, second = pb.Delta(ids=[1] * 40, drafted=1), pb.Delta(ids=[2] * 24, drafted=1)
    merge_delta(first, second)
    assert first.drafted == 1 | 1 << 40
    merge_delta(first, pb.Delta(ids=[3], drafted=1))
    assert len(first.ids) == 65 and first.drafted == 0


async def test_outbox_bound() -> None:
    outbox = Outbox(100)
    calls: list[int] = []
    outbox.on_overflow = lambda: calls.append(1)
    event = pb.GenerateEvent(delta=pb.Delta(text="x" * 60))
    assert outbox.put(event)
    assert await outbox.get()
    assert outbox.put(event) and not outbox.put(event)
    assert outbox.error is not None and outbox.error.reason == "SLOW_READER" and calls == [1]
    assert await outbox.get() == []


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_resumed_text_continues_at_the_byte(sent: int) -> None:
    output = ChoiceOutput(0, StopRules(), TOKENIZER, final_only=False)
    output.resume([*"aé".encode()], None, sent, 3)
    (event,) = output.events(ChoiceUpdate(0, [ord("z")], None, 0, None, None))
    assert event.delta.text == "aéz".encode()[sent:].decode()
    assert (event.delta.token_offset, event.delta.text_offset) == (3, sent)
