"""Parsers alone: the result is the same however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from gateway.tools.base import CallArgs, CallStart, Content, OutputParser, Piece, Reasoning, ToolContext
from gateway.tools.plan import PARSERS, detect_format
from gateway.tools.reasoning import ThinkParser

NAMES = frozenset({"f", "get_weather"})
ARGS = {"city": "Rome", "note": 'a "quoted" } brace', "deep": {"list": [1, 2.5, None, True]}}
RAW = json.dumps(ARGS)
D = "<｜tool▁calls▁begin｜>"

CASES: dict[str, list[tuple[str, str, int]]] = {
    # format → (text, content, calls)
    "hermes": [
        (f'Hi <tool_call>\n{{"name": "f", "arguments": {RAW}}}\n</tool_call>', "Hi ", 1),
        (f'<tool_call>{{"arguments": {RAW}, "name": "f"}}</tool_call>' * 2, "", 2),
        ('<tool_call>{"name": "f"}</tool_call> done', " done", 1),
        ("a < b and <tool> too", "a < b and <tool> too", 0),
        ('<tool_call>\n{"name": "nobody", "arguments": {}}', '<tool_call>\n{"name": "nobody", "arguments": {}}', 0),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", 0),
    ],
    "llama3": [
        (f'{{"name": "f", "parameters": {RAW}}}', "", 1),
        (f'<|python_tag|>{{"name": "f", "parameters": {RAW}}}; {{"name": "get_weather", "parameters": {{}}}}', "", 2),
        ("Just text with {braces}", "Just text with {braces}", 0),
        ('{"no": "call"} at all', '{"no": "call"} at all', 0),
    ],
    "mistral": [
        (f'[TOOL_CALLS] [{{"name": "f", "arguments": {RAW}}}, {{"name": "f", "arguments": {{}}}}]', "", 2),
        (f"ok [TOOL_CALLS]f[ARGS]{RAW}[TOOL_CALLS]get_weather[ARGS]{{}}", "ok ", 2),
        (f"[TOOL_CALLS]f{RAW}", "", 1),
        ("[TOOL] text", "[TOOL] text", 0),
    ],
    "pythonic": [
        ("[f(city='Rome', deep={'list': [1, true, null]}), get_weather()]", "", 2),
        ("[1, 2, 3]", "[1, 2, 3]", 0),
        ("[f(__import__('os'))]", "[f(__import__('os'))]", 0),
        ("plain", "plain", 0),
    ],
    "deepseek": [
        (
            f"Hm.{D}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{RAW}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            "Hm.",
            1,
        ),
        (
            f"{D}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{RAW}<｜tool▁call▁end｜>"
            "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            2,
        ),
        ("a <｜ b", "a <｜ b", 0),
    ],
}


def run(parser: OutputParser, pieces: list[str]) -> list[Piece]:
    out: list[Piece] = []
    for piece in pieces:
        out += parser.feed(piece)
    return out + parser.finish()


def content(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def calls(pieces: list[Piece]) -> list[tuple[str, str]]:
    found: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(found)
            found.append([piece.name, ""])
        elif isinstance(piece, CallArgs):
            found[piece.index][1] += piece.text
    return [(name, arguments) for name, arguments in found]


def cuts(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    pieces = []
    while text:
        size = rng.randint(1, 7)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def every_cut(make: Callable[[], OutputParser], text: str) -> list[list[Piece]]:
    return [run(make(), [text]), run(make(), list(text)), *(run(make(), cuts(text, seed)) for seed in range(5))]


@pytest.mark.parametrize(
    ("name", "text", "text_left", "count"),
    [(name, *case) for name, cases in CASES.items() for case in cases],
)
def test_a_format_however_it_is_cut(name: str, text: str, text_left: str, count: int) -> None:
    results = every_cut(lambda: PARSERS[name](ToolContext(NAMES)), text)
    assert all(calls(result) == calls(results[0]) for result in results)
    for result in results:
        assert content(result) == text_left
        assert len(calls(result)) == count
        for called, arguments in calls(result):
            assert called in NAMES and isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("name", "head"),
    [("mistral", "[TOOL_CALLS]f[ARGS]"), ("deepseek", f"{D}<｜tool▁call▁begin｜>f<｜tool▁sep｜>")],
)
def test_broken_arguments_are_passed_on_and_nothing_behind_them_is_lost(name: str, head: str) -> None:
    broken = '{"\\q": 1} and more'  # an escape that JSON does not know
    for result in every_cut(lambda: PARSERS[name](ToolContext(NAMES)), head + broken):
        assert calls(result) == [("f", '{"\\q"')]
        assert content(result) == ": 1} and more"


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "deepseek"])
def test_arguments_arrive_before_they_are_whole(name: str) -> None:
    text = CASES[name][0][0]
    pieces = run(PARSERS[name](ToolContext(NAMES)), list(text))
    assert sum(isinstance(piece, CallArgs) for piece in pieces) > 10
    assert json.loads(calls(pieces)[0][1]) == ARGS


def test_mistral_ids_have_nine_letters() -> None:
    pieces = run(PARSERS["mistral"](ToolContext(NAMES)), ["[TOOL_CALLS]f{}"])
    assert len(next(p.id for p in pieces if isinstance(p, CallStart))) == 9


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("<think>why</think>\n\nbecause", False, "why", "because"),
        ("why</think>because", True, "why", "because"),
        ("no thoughts", False, "", "no thoughts"),
        ("<thin air", False, "", "<thin air"),
        ("<think>cut off", False, "cut off", ""),
    ],
)
def test_reasoning_is_split_off(text: str, opened: bool, thought: str, answer: str) -> None:
    for result in every_cut(lambda: ThinkParser(None, opened), text):
        assert "".join(p.text for p in result if isinstance(p, Reasoning)) == thought
        assert content(result) == answer


def test_calls_after_reasoning() -> None:
    text = '<think>use <tool_call> now</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for result in every_cut(lambda: ThinkParser(PARSERS["hermes"](ToolContext(NAMES))), text):
        assert calls(result) == [("f", "{}")] and content(result) == ""


def test_formats_are_told_by_the_template() -> None:
    assert detect_format("… <tool_call> …") == "hermes"
    assert detect_format("… [TOOL_CALLS] …") == "mistral"
    assert detect_format("… <｜tool▁call▁begin｜> …") == "deepseek"
    assert detect_format("… <|python_tag|> …") == "llama3"
    assert detect_format("{{ messages }}") == "hermes"
