"""Client libraries that people use, each where it is installed: LangChain, LiteLLM, LlamaIndex, Anthropic's SDK."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from tests.gateway.conftest import Stand
from tests.gateway.mock_router import MODEL

ASK = [{"role": "user", "content": "red green blue"}]


class Weather(pydantic.BaseModel):
    """The weather."""

    sunny: bool


def test_langchain(stand: Stand) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=stand.url + "/v1", api_key="x", model=MODEL, temperature=0, max_tokens=12)
    whole = model.invoke("red green blue").content
    assert whole and "".join(chunk.content for chunk in model.stream("red green blue")) == whole
    forced = model.bind_tools([Weather], tool_choice="any", strict=True, max_tokens=300)
    assert forced.invoke("weather").tool_calls[0]["name"] == "Weather"
    assert isinstance(model.with_structured_output(Weather).invoke("weather"), Weather)
    vectors = langchain.OpenAIEmbeddings(
        base_url=stand.url + "/v1", api_key="x", model=MODEL, check_embedding_ctx_length=False
    )
    assert len(vectors.embed_query("hi")) == 8


def test_litellm(stand: Stand) -> None:
    litellm = pytest.importorskip("litellm")
    same: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": stand.url + "/v1", "api_key": "x", "max_tokens": 8}
    whole = litellm.completion(**same, messages=ASK, temperature=0).choices[0].message.content
    stream = litellm.completion(**same, messages=ASK, temperature=0, stream=True)
    assert whole == "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**same, messages=[{"role": "user", "content": "word " * 5000}])


def test_llama_index(stand: Stand) -> None:
    llama_index = pytest.importorskip("llama_index.llms.openai_like")
    model = llama_index.OpenAILike(
        model=MODEL, api_base=stand.url + "/v1", api_key="x", is_chat_model=True, max_tokens=8, temperature=0
    )
    whole = model.complete("red green").text
    assert whole and list(model.stream_complete("red green"))[-1].text == whole


def test_anthropic(stand: Stand) -> None:
    anthropic = pytest.importorskip("anthropic")
    sdk = anthropic.Anthropic(base_url=stand.url, api_key="x", max_retries=0)
    same: dict[str, Any] = {"model": MODEL, "messages": ASK, "extra_body": {"temperature": 0}}
    whole = sdk.messages.create(**same, max_tokens=8)
    with sdk.messages.stream(**same, max_tokens=8) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().stop_reason == "max_tokens"
    assert sdk.messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 5
    tool = {"name": "weather", "input_schema": Weather.model_json_schema() | {"additionalProperties": False}}
    with sdk.messages.stream(**same, max_tokens=100, tools=[tool], tool_choice={"type": "any"}) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "tool_use" and isinstance(final.content[0].input["sunny"], bool)
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(model="nope", messages=ASK, max_tokens=8)
