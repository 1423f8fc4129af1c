"""The openai SDK against a running gateway: sync, async, streaming, parse, tools, responses, embeddings."""

from __future__ import annotations

import enum
import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.gateway.conftest import Stand
from tests.gateway.mock_router import MODEL

ASK: Any = [{"role": "user", "content": "red green blue"}]
PARAMS: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PARAMS}}


class Colour(enum.StrEnum):
    red = "red"
    blue = "blue"


class Answer(pydantic.BaseModel):
    yes: bool
    colour: Colour
    size: Literal[1, 2]


@pytest.fixture
def sdk(stand: Stand) -> openai.OpenAI:
    return openai.OpenAI(base_url=stand.url + "/v1", api_key="sk-none", max_retries=0)


def test_chat_and_completion(sdk: openai.OpenAI) -> None:
    chat = sdk.chat.completions.create(model=MODEL, messages=ASK, max_tokens=5, temperature=0)
    assert chat.choices[0].message.content and chat.usage and chat.usage.completion_tokens == 5
    text = sdk.completions.create(model=MODEL, prompt="red green", max_tokens=5, temperature=0, logprobs=2)
    assert text.choices[0].text and text.choices[0].logprobs and len(text.choices[0].logprobs.tokens or []) == 5


def test_streaming(sdk: openai.OpenAI) -> None:
    plain = sdk.chat.completions.create(model=MODEL, messages=ASK, max_tokens=9, temperature=0)
    stream = sdk.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content and chunks[-1].usage == plain.usage


async def test_async_streaming(stand: Stand) -> None:
    async with openai.AsyncOpenAI(base_url=stand.url + "/v1", api_key="x", max_retries=0) as sdk:
        stream = await sdk.chat.completions.create(model=MODEL, messages=ASK, max_tokens=9, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        plain = await sdk.chat.completions.create(model=MODEL, messages=ASK, max_tokens=9, temperature=0)
    assert "".join(pieces) == plain.choices[0].message.content


def test_parse_gives_an_instance(sdk: openai.OpenAI) -> None:
    got = sdk.chat.completions.parse(model=MODEL, messages=ASK, max_tokens=200, temperature=0, response_format=Answer)
    assert isinstance(got.choices[0].message.parsed, Answer)


def test_tools_and_their_stream_helper(sdk: openai.OpenAI) -> None:
    got = sdk.chat.completions.create(
        model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=300, temperature=0
    )
    calls: Any = got.choices[0].message.tool_calls
    assert calls and json.loads(calls[0].function.arguments)["city"] in ("Paris", "Rome")
    with sdk.chat.completions.stream(
        model=MODEL,
        messages=ASK,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=300,
        temperature=0,
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather" and call.function.parsed_arguments


def test_extra_body_reaches_the_router(sdk: openai.OpenAI, stand: Stand) -> None:
    sdk.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=4, extra_body={"top_k": 3, "ignore_eos": True, "min_p": 0.5}
    )
    request = stand.router.requests[-1]
    assert request.sampling.top_k == 3 and request.stop.ignore_eos and request.sampling.min_p == 0.5


def test_errors_are_the_sdks_own(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        sdk.chat.completions.create(model="nope", messages=ASK)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model=MODEL, messages=ASK, temperature=9)
    assert caught.value.param == "temperature"
    stream = sdk.with_options(default_headers={"x-request-id": "fault:die=2"}).chat.completions.create(
        model=MODEL, messages=ASK, stream=True, max_tokens=9
    )
    with pytest.raises(openai.APIError, match="two engines died"):
        list(stream)


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL, "alias/model"]
    assert sdk.models.retrieve("alias/model").id == "alias/model"


def test_embeddings(sdk: openai.OpenAI) -> None:
    # Without encoding_format the SDK asks for base64 and decodes it.
    fast = sdk.embeddings.create(model=MODEL, input=["one", "two"])
    slow = sdk.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    assert len(fast.data) == 2 and fast.data[1].index == 1 and fast.usage.total_tokens == 2
    assert fast.data[0].embedding == pytest.approx(slow.data[0].embedding, abs=1e-6)
    assert fast.data[0].embedding != fast.data[1].embedding


def test_responses(sdk: openai.OpenAI) -> None:
    got = sdk.responses.create(
        model=MODEL, instructions="Be brief.", input="red green", max_output_tokens=8, temperature=0
    )
    assert got.output_text and got.status == "incomplete" and got.incomplete_details
    assert got.usage and got.usage.output_tokens == 8 and got.store is False
    with sdk.responses.create(
        model=MODEL, instructions="Be brief.", input="red green", max_output_tokens=8, temperature=0, stream=True
    ) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    last: Any = events[-1]
    assert last.response.output_text == got.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == got.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_responses_with_tools(sdk: openai.OpenAI, stand: Stand) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": PARAMS, "strict": True}
    got = sdk.responses.create(
        model=MODEL, input="weather", tools=[tool], tool_choice="required", max_output_tokens=300, temperature=0
    )
    call: Any = next(item for item in got.output if item.type == "function_call")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome") and got.status == "completed"
    again = sdk.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "weather"}]},
            {"type": "function_call", "call_id": call.call_id, "name": "get_weather", "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ],
        tools=[tool],
        max_output_tokens=4,
    )
    assert again.output
    with sdk.responses.create(
        model=MODEL,
        input="weather",
        tools=[tool],
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=300,
        temperature=0,
        stream=True,
    ) as stream:
        events = list(stream)
    pieces = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert len(done) == 1 and done[0].arguments == pieces and json.loads(pieces)


def test_responses_parse(sdk: openai.OpenAI) -> None:
    got = sdk.responses.parse(model=MODEL, input="x", text_format=Answer, max_output_tokens=200, temperature=0)
    assert isinstance(got.output_parsed, Answer)


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "prompt", "background"])
def test_responses_refuse_what_needs_state(stand: Stand, field: str) -> None:
    answer = stand.post("/v1/responses", {"input": "x", field: "something"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field
