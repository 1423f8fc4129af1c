"""POST /v1/messages: Anthropic's dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import Stand
from tests.gateway.mock_router import MODEL, tokenizer
from tests.gateway.sse import read_events

PATH = "/v1/messages"
ASK = [{"role": "user", "content": "red green blue"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}


def send(stand: Stand, status: int = 200, **body: Any) -> Any:
    answer = stand.post(PATH, {"model": MODEL, "max_tokens": 8, "messages": ASK, "temperature": 0, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def events_of(stand: Stand, **body: Any) -> list[Any]:
    sent = {"model": MODEL, "max_tokens": 8, "messages": ASK, "temperature": 0, **body, "stream": True}
    with stand.http.stream("POST", PATH, json=sent) as answer:
        assert answer.status_code == 200
        events = read_events(answer)
    assert all(event.name == event.json["type"] for event in events)
    return [event.json for event in events]


def test_shape(stand: Stand) -> None:
    answer = send(stand)
    assert answer["type"] == "message" and answer["role"] == "assistant" and answer["model"] == MODEL
    (block,) = answer["content"]
    assert block["type"] == "text" and block["text"]
    assert answer["stop_reason"] == "max_tokens" and answer["stop_sequence"] is None
    usage = answer["usage"]
    assert usage["output_tokens"] == 8 and usage["cache_read_input_tokens"] == 4
    count = stand.post(PATH + "/count_tokens", {"messages": ASK}).json()["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count


def test_stream_equals_plain(stand: Stand) -> None:
    plain = send(stand)
    events = events_of(stand)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.index("content_block_start") < kinds.index("content_block_delta") < kinds.index("content_block_stop")
    text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert text == plain["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens" and events[-2]["usage"]["output_tokens"] == 8


def test_stop_sequences(stand: Stand) -> None:
    text = send(stand, max_tokens=20)["content"][0]["text"]
    stop = text[8:12]
    answer = send(stand, max_tokens=20, stop_sequences=[stop])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == text[: text.index(stop)]


def test_system_blocks_and_prefill(stand: Stand) -> None:
    talk = [*ASK, {"role": "assistant", "content": "The river"}]
    send(stand, system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], messages=talk)
    text = tokenizer().decode(stand.router.requests[0].token_ids.ids, skip_special=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>") and text.endswith("assistant\nThe river")


def test_tools_there_and_back(stand: Stand) -> None:
    answer = send(stand, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=300)
    block = answer["content"][0]
    assert block["type"] == "tool_use" and block["input"]["city"] in ("Paris", "Rome")
    assert answer["stop_reason"] == "tool_use"
    talk = [
        *ASK,
        {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, block]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}]},
    ]
    send(stand, tools=[WEATHER], messages=talk)
    text = tokenizer().decode(stand.router.requests[-1].token_ids.ids, skip_special=False)
    assert "<tool_response>\nsunny\n</tool_response>" in text and "Hm.\n<tool_call>" in text


def test_streamed_tool_use(stand: Stand) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    events = events_of(stand, tools=[WEATHER], tool_choice=choice, max_tokens=300)
    (start,) = [e for e in events if e["type"] == "content_block_start"]
    assert start["content_block"]["name"] == "get_weather" and start["content_block"]["input"] == {}
    pieces = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert json.loads("".join(pieces))["city"] in ("Paris", "Rome")
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "invalid_request_error"),
        ({"model": "nope"}, 404, "not_found_error"),
    ],
)
def test_errors_have_anthropics_form(stand: Stand, body: dict[str, Any], status: int, kind: str) -> None:
    answer = send(stand, status, **body)
    assert answer["type"] == "error" and answer["error"]["type"] == kind and answer["error"]["message"]


def test_x_api_key(make_stand: Any, tmp_path: Any) -> None:
    from gateway.keys import hash_key

    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"id": "a", "sha256": hash_key("sk-a")}]}))
    stand = make_stand(keys_file=str(keys))
    body = {"max_tokens": 2, "messages": ASK}
    assert stand.post(PATH, body, headers={"x-api-key": "sk-a"}).status_code == 200
    answer = stand.post(PATH, body, headers={"x-api-key": "sk-b"})
    assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"


def test_turns_without_blocks(stand: Stand) -> None:
    """An empty turn adds no message, and must not make the one before it the beginning of the answer."""
    path = PATH + "/count_tokens"
    alone = stand.post(path, {"messages": [{"role": "assistant", "content": []}]})
    assert alone.status_code == 400 and alone.json()["type"] == "error"
    assert stand.post(path, {"messages": ASK}).json() == (
        stand.post(path, {"messages": [*ASK, {"role": "assistant", "content": []}]}).json()
    )


@pytest.mark.parametrize("part", [{"type": "text", "text": 5}, {"type": 5}, {"type": "image"}, {}])
def test_a_bad_part_of_a_tool_result_is_400(stand: Stand, part: dict[str, Any]) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [part]}
    error = send(stand, 400, messages=[{"role": "user", "content": [result]}])["error"]
    assert error["type"] == "invalid_request_error" and "content[0]" in error["message"]
