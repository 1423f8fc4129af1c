"""Body of POST /v1/messages (Anthropic's dialect), and its translation into a chat."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from gateway.errors import bad, unsupported
from gateway.schemas.base import Body, Int, Part, extension, no_effect, refused, validate
from gateway.schemas.chat import ChatBody


class Block(Part):
    """A content block."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None


class AnthropicTurn(Part):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Part):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class AnthropicChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Part):
    type: str
    budget_tokens: Int | None = None


class CountBody(Body):
    """What /v1/messages/count_tokens takes."""

    model: str | None = None
    messages: list[AnthropicTurn] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: ThinkingOptions | None = Field(None, description="handed to the template as enable_thinking")


class MessagesBody(CountBody):
    """A messages request."""

    max_tokens: Int = Field(ge=1, le=2**31 - 1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Int | None = Field(None, ge=0, lt=2**31)
    metadata: Any = no_effect()
    service_tier: Any = no_effect()
    container: Any = refused("no code execution")
    mcp_servers: Any = refused("no MCP connector")
    seed: Int | None = extension("Seed of the noise.", ge=-(2**63), le=2**64 - 1)
    min_p: float | None = extension("As in chat.", ge=0, le=1)
    ignore_eos: bool | None = extension("As in chat.")
    cache_salt: str | None = extension("As in chat.", min_length=1, max_length=1024)
    chat_template_kwargs: dict[str, Any] | None = extension("As in chat.")


def to_chat(body: CountBody) -> ChatBody:
    """The chat that a messages request means. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, turn in enumerate(body.messages):
        _add_turn(messages, turn, f"messages[{index}]")
    chat: dict[str, Any] = {"model": body.model, "messages": messages}
    # A turn without blocks adds no message.
    last = messages[-1] if messages else {}
    if body.messages[-1].role == last.get("role") == "assistant" and isinstance(last["content"], str):
        # A last assistant turn is the beginning of the answer.
        chat["continue_final_message"] = True
    if body.tools:
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(body.tools)]
    _choose(chat, body.tool_choice)
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    if isinstance(body, MessagesBody):
        variables.update(body.chat_template_kwargs or {})
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "min_p", "ignore_eos"):
            chat[name] = getattr(body, name)
        chat["cache_salt"] = body.cache_salt
        chat["stop"] = body.stop_sequences or None
    chat["chat_template_kwargs"] = variables or None
    return validate(ChatBody, chat)


def _choose(chat: dict[str, Any], choice: AnthropicChoice | None) -> None:
    if choice is None:
        return
    if choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    if choice.type == "tool":
        if not choice.name:
            raise bad("tool_choice of type tool needs a name.", "tool_choice.name", "missing_required_parameter")
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.type == "auto":
        chat["tool_choice"] = "auto" if chat.get("tools") else None
    else:
        chat["tool_choice"] = {"any": "required", "none": "none"}[choice.type]


def _tool(tool: AnthropicTool, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise unsupported(f"tools[{index}].type", f"{str(tool.type)[:40]!r}; only custom tools are offered")
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _text(content: str | list[Block], where: str) -> str:
    """Text blocks, joined. Raises ApiError for other blocks."""
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise unsupported(f"{where}[{index}]", f"content block {block.type[:40]!r}; this model takes text only")
        texts.append(block.text)
    return "\n".join(texts)


def _add_turn(messages: list[dict[str, Any]], turn: AnthropicTurn, where: str) -> None:
    if isinstance(turn.content, str):
        messages.append({"role": turn.role, "content": turn.content})
        return
    texts: list[Block] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for index, block in enumerate(turn.content):
        if block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result":
            messages.append(_result(block, f"{where}.content[{index}]"))
        elif block.type == "thinking" and block.thinking is not None:
            reasoning.append(block.thinking)
        elif block.type != "redacted_thinking":
            texts.append(block)
    text = _text(texts, f"{where}.content")
    if not (texts or calls):
        return
    message: dict[str, Any] = {"role": turn.role, "content": text if texts else None}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    messages.append(message)


def _result(block: Block, where: str) -> dict[str, Any]:
    content = block.content or ""
    if not isinstance(content, str):
        content = _text(content, f"{where}.content")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
