"""Tool calls through the API."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from gateway.schemas.chat import Tool
from gateway.tools.base import CallArgs, CallStart, ToolContext
from gateway.tools.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEP
from gateway.tools.plan import PARSERS
from gateway.tools.pythonic import PythonicParser
from gateway.tools.strict import strict_grammar
from tests.gateway.conftest import Stand
from tests.gateway.mock_router import ll_tokenizer, tokenizer
from tests.gateway.sse import read_events

PATH = "/v1/chat/completions"
PARAMS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMS}}
CLOCK = {"type": "function", "function": {"name": "get_time", "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL_TEXT = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(stand: Stand, status: int = 200, **body: Any) -> Any:
    body = {"messages": ask("weather"), "temperature": 0, "max_tokens": 150, **body}
    answer = stand.post(PATH, body)
    assert answer.status_code == status, answer.text
    return answer.json()


def say(stand: Stand, text: str, **body: Any) -> dict[str, Any]:
    """Makes the toy model say exactly this text: a grammar leaves it no choice."""
    return {"structured_outputs": {"regex": _escape(text)}, "max_tokens": 200, **body}


def _escape(text: str) -> str:
    return "".join("\\" + char if char in r"\.[]{}()*+?^$|/" else char for char in text).replace("\n", "\\n")


def test_a_named_choice_calls_that_tool_by_grammar(stand: Stand) -> None:
    choice = chat(stand, tools=[CLOCK, WEATHER], tool_choice=NAMED)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather" and choice["message"]["content"] is None
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMS)
    assert choice["finish_reason"] == "tool_calls"


def test_required_calls_some_tools(stand: Stand) -> None:
    choice = chat(stand, tools=[WEATHER, CLOCK], tool_choice="required", max_tokens=600)["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert calls and len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            jsonschema.validate(arguments, PARAMS)
        else:
            assert arguments == {}
    assert choice["finish_reason"] == "tool_calls"


def test_without_parallel_calls_there_is_one(stand: Stand) -> None:
    body: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    assert len(chat(stand, **body)["choices"][0]["message"]["tool_calls"]) == 1


def test_streamed_calls_assemble(stand: Stand) -> None:
    for choice in (NAMED, "required"):
        body = {
            "messages": ask("weather"),
            "temperature": 0,
            "max_tokens": 600,
            "stream": True,
            "tools": [WEATHER],
            "tool_choice": choice,
        }
        with stand.http.stream("POST", PATH, json=body) as answer:
            chunks = [event.json for event in read_events(answer)[:-1]]
        calls: dict[int, dict[str, str]] = {}
        for chunk in chunks:
            for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] not in calls and part["type"] == "function"
                    calls[part["index"]] = {"name": part["function"]["name"], "arguments": ""}
                calls[part["index"]]["arguments"] += part["function"]["arguments"]
        assert list(calls) == list(range(len(calls))) and calls
        for call in calls.values():
            jsonschema.validate(json.loads(call["arguments"]), PARAMS)
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_call_that_was_cut_off_ends_with_length(stand: Stand, choice: Any) -> None:
    """Half a call must not look like one: a client that trusts `tool_calls` would parse its arguments."""
    body = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 14 if choice == "required" else 3}
    plain = chat(stand, **body)["choices"][0]
    assert plain["finish_reason"] == "length" and plain["message"]["tool_calls"]
    sent = {"messages": ask("weather"), "temperature": 0, "stream": True, **body}
    with stand.http.stream("POST", PATH, json=sent) as answer:
        chunks = [event.json for event in read_events(answer)[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_auto_finds_calls_in_the_text(stand: Stand) -> None:
    text = "Let me look. " + CALL_TEXT
    body = say(stand, text, tools=[WEATHER], messages=ask("weather"), temperature=0)
    choice = stand.post(PATH, body).json()["choices"][0]
    assert choice["message"]["content"] == "Let me look." and choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 2}
    with stand.http.stream("POST", PATH, json={**body, "stream": True}) as answer:
        chunks = [event.json for event in read_events(answer)[:-1]]
    content = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    parts = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", ())]
    assert content.strip() == "Let me look." and "tool_call" not in content
    assert json.loads("".join(p["function"]["arguments"] for p in parts)) == {"city": "Rome", "days": 2}
    assert len(parts) > 3, "arguments arrive in pieces"


def test_a_call_of_an_unknown_tool_is_text(stand: Stand) -> None:
    text = CALL_TEXT.replace("get_weather", "format_disk")
    choice = stand.post(PATH, say(stand, text, tools=[WEATHER], messages=ask("x"), temperature=0)).json()["choices"][0]
    assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_is_text(stand: Stand) -> None:
    text = CALL_TEXT[:60]
    choice = stand.post(PATH, say(stand, text, tools=[WEATHER], messages=ask("x"), temperature=0)).json()["choices"][0]
    assert choice["message"]["content"] == text and "tool_calls" not in choice["message"]


def test_none_leaves_tools_out_of_prompt_and_answer(stand: Stand) -> None:
    message = chat(stand, tools=[WEATHER], tool_choice="none", max_tokens=4)["choices"][0]["message"]
    assert message["content"] and "tool_calls" not in message
    assert "get_weather" not in tokenizer().decode(stand.router.requests[0].token_ids.ids)


def test_a_template_without_tools_gets_them_in_the_system_message(stand: Stand) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    chat(stand, messages=talk, tools=[WEATHER], max_tokens=2)
    text = tokenizer().decode(stand.router.requests[0].token_ids.ids, skip_special=False)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou are a function calling AI model.")
    assert '"name": "get_weather"' in text and "<tool_response>\nsunny\n</tool_response>" in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [CLOCK]}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
    ],
)
def test_contradictions_are_400(stand: Stand, body: dict[str, Any], param: str) -> None:
    assert chat(stand, 400, **body)["error"]["param"] == param


def matches(grammar: str, text: str) -> bool:
    """Whether llguidance accepts the whole text."""
    import llguidance

    matcher = llguidance.LLMatcher(ll_tokenizer(), llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer().encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar_of(name: str, template: str = "", **special: int) -> str:
    """The grammar for a strict tool and a loose one; `special` maps marks to the tokens that they are."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    loose = {"type": "function", "function": {"name": "note"}}
    grammar = strict_grammar(name, [Tool.model_validate(strict), Tool.model_validate(loose)], template, special.get)
    assert grammar is not None
    return grammar


def _deepseek_call(arguments: str, fenced: bool) -> str:
    inner = f"function{SEP}get_weather\n```json\n{arguments}\n```" if fenced else f"get_weather{SEP}{arguments}"
    return CALLS_BEGIN + CALL_BEGIN + inner + CALL_END + CALLS_END


LLAMA = '{"name": "get_weather", "parameters": %s}'
ONE = '{"name": "get_weather", "arguments": %s}'
FORMATS = [
    ("llama3", "", LLAMA, {}),
    ("llama3", "", LLAMA + "; " + LLAMA, {}),
    ("llama3", "", "<|im_start|>" + LLAMA, {"<|python_tag|>": 1}),
    ("mistral", "", "Look: [TOOL_CALLS][" + ONE + "]", {}),
    ("mistral", "", "Look: <|im_start|>[" + ONE + ", " + ONE + "]", {"[TOOL_CALLS]": 1}),
    ("mistral", "[ARGS]", "[TOOL_CALLS]get_weather[ARGS]%s[TOOL_CALLS]get_weather[ARGS]%s", {}),
    ("deepseek", "", "Look: " + _deepseek_call("%s", False), {}),
    ("deepseek", "```json", _deepseek_call("%s", True), {}),
    ("deepseek", "", _deepseek_call("%s", False).replace(CALLS_BEGIN, "<|im_start|>"), {CALLS_BEGIN: 1}),
]


@pytest.mark.parametrize(("name", "template", "text", "special"), FORMATS)
def test_strict_calls_under_auto_in_every_format(name: str, template: str, text: str, special: dict[str, int]) -> None:
    grammar = grammar_of(name, template, **special)
    good, bad = text.replace("%s", '{"city": "Rome", "days": 2}'), text.replace("%s", '{"city": "Mars", "days": 2}')
    assert matches(grammar, good)
    assert not matches(grammar, bad)
    assert not matches(grammar, good.replace("get_weather", "other"))
    assert matches(grammar, "Any text at all, even <tool and {json}.")
    if special:
        return
    # The parser reads what the grammar lets through as calls.
    context = ToolContext(frozenset({"get_weather", "note"}))
    parser = PARSERS[name](context)
    pieces = [piece for char in good for piece in parser.feed(char)] + parser.finish()
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    assert len(starts) == text.count("%s")
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArgs) and piece.index == 0)
    assert json.loads(arguments) == {"city": "Rome", "days": 2}


def test_strict_pythonic_calls_under_auto() -> None:
    grammar = grammar_of("pythonic")
    good = '[get_weather(city="Rome", days=2), note(text="a", at={"x": [1, true]})]'
    assert matches(grammar, good) and matches(grammar, "Any text, even [1].")
    assert not matches(grammar, good.replace("Rome", "Mars"))
    assert not matches(grammar, good.replace("get_weather", "other"))
    assert not matches(grammar, " [x")
    pieces = PythonicParser(ToolContext(frozenset({"get_weather", "note"})))
    assert pieces.feed(good) == []
    assert [piece.text for piece in pieces.finish() if isinstance(piece, CallArgs)] == [
        '{"city": "Rome", "days": 2}',
        '{"text": "a", "at": {"x": [1, true]}}',
    ]
    assert matches(grammar, "[note()]")


def test_text_may_not_spell_a_mark_that_is_a_token() -> None:
    """Spelled out it would begin a call that no schema binds."""
    assert not matches(grammar_of("mistral", **{"[TOOL_CALLS]": 1}), "[TOOL_CALLS][x")
    assert not matches(grammar_of("deepseek", **{CALLS_BEGIN: 1}), CALL_BEGIN + "x")
    assert not matches(grammar_of("llama3"), "<|python_tag|>{")


def test_the_grammar_of_auto_binds_only_calls_that_begin() -> None:
    grammar = grammar_of("hermes")
    assert matches(grammar, "Any text at all, even <tool and {json}.")
    assert matches(grammar, "So: " + CALL_TEXT)
    assert matches(grammar, CALL_TEXT + "\n" + CALL_TEXT)
    assert not matches(grammar, CALL_TEXT.replace("Rome", "Mars"))
    assert not matches(grammar, CALL_TEXT.replace("get_weather", "other"))
    assert not matches(grammar, CALL_TEXT[:-5])


def test_auto_with_a_strict_tool_sends_that_grammar(stand: Stand) -> None:
    chat(stand, tools=[CLOCK], max_tokens=4)
    assert "arguments_0" in stand.router.requests[0].structured.grammar
    chat(stand, tools=[WEATHER], max_tokens=4)
    assert stand.router.requests[1].structured.WhichOneof("kind") is None
