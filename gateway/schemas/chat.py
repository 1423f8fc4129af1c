"""Body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from gateway.errors import unsupported
from gateway.schemas.base import Int, Part, extension, refused
from gateway.schemas.sampling import SamplingBody

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


class ContentPart(Part):
    """One part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None

    def as_text(self, param: str) -> str:
        """The part's text.

        Raises:
            ApiError: the part is no text.
        """
        if self.type in ("text", "input_text", "output_text") and self.text is not None:
            return self.text
        if self.type == "refusal" and self.refusal is not None:
            return self.refusal
        raise unsupported(param, f"content part {self.type[:40]!r}; this model takes text only")


class FunctionCall(Part):
    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Part):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Part):
    """One message of a conversation."""

    # The rule of _has_content, for the document.
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}}},
                {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
            ]
        }
    )

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role} needs content")
        return self


class FunctionDef(Part):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    type: Literal["function"]
    function: FunctionDef


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """A chat completion request."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: Int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: Int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="handed to the chat template")
    functions: Any = refused("use tools")
    function_call: Any = refused("use tool_choice")
    audio: Any = refused("no audio output")
    modalities: list[str] | None = Field(None, description="only text")
    web_search_options: Any = refused("no web search")
    verbosity: Any = refused("the model has no such control")
    moderation: Any = refused("no moderation model")

    add_generation_prompt: bool | None = extension("Open the assistant's turn (default true).")
    continue_final_message: bool | None = extension("Go on with the last message instead of opening a turn.")
    chat_template: str | None = extension("Template for this request, if the server allows it.")
    chat_template_kwargs: dict[str, Any] | None = extension("Variables for the template.")
    documents: list[dict[str, Any]] | None = extension("Handed to the chat template.")
    echo: bool | None = extension("Return the last message's content before the answer (needs continue_final_message).")
    include_reasoning: bool | None = extension("false drops reasoning_content.")
    return_token_sources: bool | None = extension(
        "Tell for each streamed token whether a draft proposed it (draft) or the engine wrote it (engine)."
    )

    @model_validator(mode="after")
    def _together(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.modalities is not None and set(self.modalities) != {"text"}:
            raise ValueError("modalities may only be ['text']")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.return_token_sources and not self.stream:
            raise ValueError("return_token_sources needs stream: true")
        if self.echo and not self.continue_final_message:
            raise ValueError("echo needs continue_final_message")
        return self
