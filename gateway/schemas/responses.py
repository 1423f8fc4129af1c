"""Body of POST /v1/responses, and its translation into a chat."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gateway.errors import bad, unsupported
from gateway.schemas.base import STORE, Body, Int, Part, extension, no_effect, refused, validate
from gateway.schemas.chat import ChatBody


class ResponseTool(Part):
    """A function tool; the API's flat form."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponseTool(Part):
    type: Literal["function"]
    name: str


class TextFormat(Part):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Part):
    format: TextFormat | None = None


class ReasoningOptions(Part):
    effort: str | None = None
    summary: Any = None


class ResponsesBody(Body):
    """A request without server-side state."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = Field(None, description="effort is handed to the chat template")
    truncation: Literal["auto", "disabled"] | None = Field(None, description="auto drops the oldest prompt tokens")
    user: str | None = None
    metadata: dict[str, Any] | None = Field(None, description="returned as it came")
    store: bool | None = Field(None, description=f"{STORE}; the answer always says false")
    include: Any = no_effect()
    service_tier: Any = no_effect()
    prompt_cache_key: Any = no_effect()
    prompt_cache_retention: Any = no_effect()
    safety_identifier: Any = no_effect()
    stream_options: Any = no_effect()
    max_tool_calls: Any = no_effect("there are no built-in tools to limit")
    previous_response_id: Any = refused("nothing is stored; send the whole conversation")
    conversation: Any = refused("nothing is stored; send the whole conversation")
    prompt: Any = refused("there are no stored prompts")
    background: Any = refused("answers are not kept")
    top_logprobs: Any = refused("use /v1/chat/completions for logprobs")
    context_management: Any = refused("nothing is stored")
    moderation: Any = refused("no moderation model")

    seed: Int | None = extension("Seed of the noise.", ge=-(2**63), le=2**64 - 1)
    top_k: Int | None = extension("Keep the k likeliest tokens.", ge=-1, lt=2**31)
    min_p: float | None = extension("As in chat.", ge=0, le=1)
    stop: str | list[str] | None = extension("As in chat.")
    repetition_penalty: float | None = extension("As in chat.", gt=0, le=100)
    presence_penalty: float | None = extension("As in chat.", ge=-2, le=2)
    frequency_penalty: float | None = extension("As in chat.", ge=-2, le=2)
    logit_bias: dict[str, float] | None = extension("As in chat.")
    ignore_eos: bool | None = extension("As in chat.")
    min_tokens: Int | None = extension("As in chat.", ge=0, lt=2**31)
    cache_salt: str | None = extension("As in chat.", min_length=1, max_length=1024)
    priority: Int | None = extension("As in chat.", ge=-(2**31), lt=2**31)
    chat_template_kwargs: dict[str, Any] | None = extension("As in chat.")


_SAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "seed",
    "top_k",
    "min_p",
    "stop",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "min_tokens",
    "cache_salt",
    "store",
    "priority",
    "chat_template_kwargs",
)


def to_chat(body: ResponsesBody) -> ChatBody:
    """The chat that a responses request means. Raises ApiError."""
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    chat["messages"] = _messages(body)
    chat["max_completion_tokens"] = body.max_output_tokens
    if body.truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if isinstance(choice, NamedResponseTool):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        # The SDK sends "auto" also without tools.
        chat["tool_choice"] = choice if body.tools or choice == "required" else None
    form = body.text.format if body.text else None
    if form is not None and form.type == "json_object":
        chat["response_format"] = {"type": "json_object"}
    elif form is not None and form.type == "json_schema":
        if form.schema_ is None:
            raise bad("text.format needs a schema.", "text.format.schema", "missing_required_parameter")
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": form.name, "schema": form.schema_, "strict": form.strict},
        }
    return validate(ChatBody, chat)


def _tool(tool: ResponseTool, index: int) -> dict[str, Any]:
    if tool.type != "function":
        raise unsupported(f"tools[{index}].type", f"{tool.type[:40]!r}; only function tools are offered")
    if not tool.name:
        raise bad(f"tools[{index}] needs a name.", f"tools[{index}].name", "missing_required_parameter")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise bad("input must not be empty.", "input")
    for index, item in enumerate(body.input):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        if "role" not in item or "content" not in item:
            raise bad(f"{where} needs role and content.", where, "missing_required_parameter")
        messages.append({"role": item["role"], "content": item["content"]})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")},
        }
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind == "reasoning":
        # Earlier reasoning is not fed back, as with OpenAI's own models.
        return
    else:
        raise unsupported(f"{where}.type", f"item {str(kind)[:40]!r}")
