"""Bodies of /tokenize, /detokenize and /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from gateway.schemas.base import Body, Int, extension, no_effect
from gateway.schemas.chat import Message, Tool
from gateway.schemas.prompts import Prompts


def _ids(value: Any) -> list[int]:
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    raise ValueError("must be a list of token ids")


Ids = Annotated[Any, BeforeValidator(_ids), WithJsonSchema({"type": "array", "items": {"type": "integer"}})]


class TokenizeBody(Body):
    """Text, or messages that are rendered first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(None, description="add bos (default true for prompt, false for messages)")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: Ids


class EmbeddingBody(Body):
    """An embeddings request."""

    model: str | None = None
    input: Prompts = Field(description="text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = Field(None, ge=1, description="only the model's own size")
    user: Any = no_effect()
    pooling: Literal["mean", "last"] | None = extension("How hidden states become one vector (default mean).")
    normalize: bool | None = extension("Scale vectors to length 1 (default true).")
    add_special_tokens: bool | None = extension("Add the bos token if the tokenizer has one (default true).")
    truncate_prompt_tokens: Int | None = extension("Keep the last so many tokens; -1: what fits.", ge=-1)
