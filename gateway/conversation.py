"""From chat messages to the prompt text: content parts, tool turns, tool definitions, and an open last turn."""

from __future__ import annotations

import json
from typing import Any

from gateway.errors import bad
from gateway.schemas.chat import ContentPart, Message, Tool
from gateway.templates import ChatTemplate, ChatTemplates, render_untrusted

HERMES_SYSTEM = """\
You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags. \
You may call one or more functions to assist with the user query.
<tools>
{tools}
</tools>
For each function call return a JSON object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": "function-name", "arguments": {{"argument-name": "value"}}}}
</tool_call>"""


def content_text(content: str | list[ContentPart] | None, param: str) -> str:
    """The text of a message; several parts are joined by line breaks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part.as_text(f"{param}[{index}]") for index, part in enumerate(content))


def _arguments(raw: str | dict[str, Any]) -> Any:
    """Templates expect an object; what is none stays text."""
    if not isinstance(raw, str):
        return raw
    try:
        parsed = json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError):
        return raw
    return parsed if isinstance(parsed, dict) else raw


def message_dicts(messages: list[Message], template: ChatTemplate) -> list[dict[str, Any]]:
    """Messages as templates want them: text content, parsed arguments, roles that the template knows."""
    knows_developer = "developer" in template.source
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        role = message.role
        if role == "developer" and not knows_developer:
            role = "system"
        elif role == "function":
            role = "tool"
        entry: dict[str, Any] = {
            "role": role,
            "content": content_text(message.content, f"messages[{index}].content"),
        }
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if message.reasoning_content is not None:
            entry["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        result.append(entry)
    return result


def _with_hermes_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that know no tools: calls and results as text, in the form the model is told to use."""
    result: list[dict[str, Any]] = []
    for message in messages:
        message = dict(message)
        calls = message.pop("tool_calls", None)
        if calls:
            texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
            message["content"] = "\n".join([*([message["content"]] if message["content"] else []), *texts])
        if message["role"] == "tool":
            message["role"] = "user"
            message["content"] = f"<tool_response>\n{message['content']}\n</tool_response>"
        result.append(message)
    return result


def _with_hermes_system(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool definitions in the system message."""
    text = HERMES_SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def tool_dicts(tools: list[Tool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def render_prompt(
    templates: ChatTemplates,
    messages: list[Message],
    *,
    tools: list[Tool] | None = None,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    variables: dict[str, Any] | None = None,
    documents: list[dict[str, Any]] | None = None,
    request_template: str | None = None,
) -> str:
    """The prompt text of a conversation.

    Raises:
        ApiError: 400 where the template refuses it or the last turn cannot be continued.
    """
    template = (
        ChatTemplate(request_template, limit=64 * 1024) if request_template else templates.pick(with_tools=bool(tools))
    )
    entries = message_dicts(messages, template)
    definitions = tool_dicts(tools) if tools else None
    if not template.takes_tools:
        entries = _with_hermes_turns(entries)
        if definitions:
            entries = _with_hermes_system(entries, definitions)
    for name in variables or {}:
        if name in ("messages", "tools", "add_generation_prompt"):
            raise bad(f"chat_template_kwargs may not hold {name!r}.", "chat_template_kwargs")
    scope = {
        **templates.special_tokens,
        **(variables or {}),
        "messages": entries,
        "tools": definitions if template.takes_tools else None,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt and not continue_final,
    }
    text = render_untrusted(request_template, scope) if request_template else template.render(scope)
    return _left_open(text, entries[-1]) if continue_final else text


def _left_open(text: str, last: dict[str, Any]) -> str:
    """Cuts the rendered text behind the last message's content, so that the model goes on with it."""
    content = last["content"]
    for wanted in (content, content.strip()):
        at = text.rfind(wanted) if wanted else -1
        if at >= 0:
            return text[: at + len(wanted)]
    raise bad("continue_final_message: the last message's content is not found in the rendered prompt.", "messages")
