"""Calls that a request forces: the grammar makes the whole text JSON, whatever format the model was trained on."""

from __future__ import annotations

import json
from typing import Any

from gateway.schemas.chat import Tool
from gateway.tools.base import CallArgs, CallEmitter, CallStart, Piece, ToolContext

# A small model under "required" would list calls until its tokens run out.
MAX_FORCED_CALLS = 8
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


def parameters_of(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or EMPTY


def named_schema(tool: Tool) -> str:
    """JSON schema of a named call: the text is the arguments alone."""
    schema = dict(parameters_of(tool))
    schema["x-guidance"] = _options(strict=bool(tool.function.strict))
    return json.dumps(schema, ensure_ascii=False)


def required_schema(tools: list[Tool], parallel: bool) -> str:
    """JSON schema of "required": a list of {"name": …, "parameters": …}."""
    definitions: dict[str, Any] = {}
    options = []
    for tool in tools:
        parameters = dict(parameters_of(tool))
        # References are resolved from the root, so definitions move there.
        for name in ("$defs", "definitions"):
            if isinstance(parameters.get(name), dict):
                definitions.setdefault(name, {}).update(parameters.pop(name))
        options.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_FORCED_CALLS if parallel else 1,
        "items": options[0] if len(options) == 1 else {"anyOf": options},
        **definitions,
        "x-guidance": _options(strict=all(tool.function.strict for tool in tools)),
    }
    return json.dumps(schema, ensure_ascii=False)


def _options(strict: bool) -> dict[str, Any]:
    """llguidance's own options: compact JSON, so that no tokens go into blanks; keywords that it does not know are
    refused for strict tools and ignored for others."""
    return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": not strict}


class NamedParser:
    """The whole text is the arguments of one known function."""

    def __init__(self, context: ToolContext, name: str) -> None:
        self._context = context
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        pieces: list[Piece] = []
        if not self._started:
            self._started = True
            pieces.append(CallStart(0, self._context.make_id(), self._name))
        return [*pieces, CallArgs(0, text)]

    def finish(self) -> list[Piece]:
        return []


class RequiredParser:
    """The whole text is a JSON list of calls."""

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        self._held = ""
        self._call: CallEmitter | None = None
        self._count = 0

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            if self._call is None:
                at = self._held.find("{")
                if at < 0:
                    self._held = ""
                    break
                self._held = self._held[at:]
                self._call = CallEmitter(self._context, self._count)
            text, self._held = self._held, ""
            pieces += self._call.feed(text)
            if self._call.scanner.end >= 0:
                self._held, self._call = self._call.scanner.rest, None
                self._count += 1
        return pieces

    def finish(self) -> list[Piece]:
        return []
