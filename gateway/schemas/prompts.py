"""Prompts as legacy endpoints take them: text, token ids, or a list of either."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

Prompt = str | list[int]

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPTS_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}


def _is_ids(value: Any) -> bool:
    # type(...) is int: True and False are no token ids. Far faster than a model per token.
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompts(value: Any) -> list[Prompt]:
    """A list of prompts, each text or ids.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, str):
        return [value]
    if _is_ids(value):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(_is_ids(item) for item in value):
            return list(value)
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists, not empty")


Prompts = Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(PROMPTS_SCHEMA)]
