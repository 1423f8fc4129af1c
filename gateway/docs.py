"""/openapi.json: request schemas come from the models that validate, answers and errors from here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gateway.schemas.base import REFUSED, Body
from tandem import __version__

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
        "total_tokens": {"type": "integer"},
    },
}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


_STRING, _INTEGER, _ARRAY = {"type": "string"}, {"type": "integer"}, {"type": "array"}
ANSWERS: dict[str, dict[str, Any]] = {
    "Error": _ERROR,
    "AnthropicError": _ANTHROPIC_ERROR,
    "Usage": _USAGE,
    "Status": _object({"status": _STRING}, models={"type": "array", "items": _STRING}),
    "Version": _object({"version": _STRING}),
    "Model": _object(
        {"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING}, max_model_len=_INTEGER
    ),
    "ModelList": _object(
        {"object": {"const": "list"}, "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}
    ),
    "Tokens": _object({"count": _INTEGER, "max_model_len": _INTEGER, "tokens": {"type": "array", "items": _INTEGER}}),
    "Text": _object({"prompt": _STRING}),
    "ChatCompletion": _object(
        {
            "id": _STRING,
            "object": {"const": "chat.completion"},
            "created": _INTEGER,
            "model": _STRING,
            "choices": _ARRAY,
            "usage": {"$ref": "#/components/schemas/Usage"},
        },
        system_fingerprint=_STRING,
    ),
    "Completion": _object(
        {
            "id": _STRING,
            "object": {"const": "text_completion"},
            "created": _INTEGER,
            "model": _STRING,
            "choices": _ARRAY,
            "usage": {"$ref": "#/components/schemas/Usage"},
        },
        system_fingerprint=_STRING,
    ),
    "EmbeddingList": _object(
        {"object": {"const": "list"}, "data": _ARRAY, "model": _STRING, "usage": {"type": "object"}}
    ),
    "Response": _object({"id": _STRING, "object": {"const": "response"}, "status": _STRING, "output": _ARRAY}),
    "AnthropicMessage": _object({"id": _STRING, "type": {"const": "message"}, "role": _STRING, "content": _ARRAY}),
    "Fleet": _object(
        {"unix_ms": _INTEGER, "engines": _ARRAY, "queued": _INTEGER, "shed": _INTEGER, "latency": {"type": "object"}}
    ),
    "Routes": _object({"data": _ARRAY}),
    "Requests": _object({"data": _ARRAY}),
    "Decision": _object({"chosen": _STRING, "reason": _STRING, "policy": _STRING, "candidates": _ARRAY}),
    "TokenCount": _object({"input_tokens": _INTEGER}),
}

_MEANINGS = {
    400: "The request is not valid",
    401: "The API key is missing or wrong",
    404: "No such model",
    408: "The body came too slowly",
    413: "The body is too large",
    429: "The key's rate is used up",
    500: "The server failed",
    503: "No engine can serve now",
    504: "The request expired",
}
_ALWAYS_BODY = (400, 401, 408, 413, 429, 500, 503, 504)
_ALWAYS = (401, 429, 500, 503, 504)


def describe(
    summary: str,
    body: type[Body] | None = None,
    *,
    ok: str | None,
    errors: tuple[int, ...] = (),
    stream: bool = False,
    anthropic: bool = False,
    query: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a route that make its entry in /openapi.json true.

    `query`: JSON schema by name of what may follow the question mark; none of it is required.
    """
    error = "AnthropicError" if anthropic else "Error"
    responses: dict[int | str, dict[str, Any]] = {
        status: {
            "description": _MEANINGS[status],
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}},
        }
        for status in sorted({*(_ALWAYS_BODY if body else _ALWAYS), *errors})
    }
    content: dict[str, Any] = {"text/plain": {"schema": _STRING}}
    if ok is not None:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ok}"}}}
    if stream:
        content["text/event-stream"] = {}
    responses[200] = {"description": "The answer", "content": content}
    extra: dict[str, Any] = {}
    if body is not None:
        _BODIES[body.__name__] = body
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if query:
        extra["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in query.items()
        ]
    return {
        "summary": summary,
        "response_model": None,
        "responses": responses,
        "openapi_extra": extra,
        "include_in_schema": True,
    }


_BODIES: dict[str, type[Body]] = {}


# Rules that pydantic's types do not tell.
_STRICTER: dict[str, dict[str, Any]] = {
    "truncate_prompt_tokens": {"not": {"const": 0}},
    "logit_bias": {"propertyNames": {"pattern": "^[0-9]+$"}},
}
# What may stand in a field that is refused: values that ask for nothing.
_NEUTRAL: list[Any] = [None, False, "", [], {}]
_LIMITS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def json_schema(model: type[Body]) -> dict[str, Any]:
    """The model's JSON schema. pydantic leaves limits behind a validator under its own names; they get JSON's."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")

    def rename(node: Any) -> None:
        if isinstance(node, dict):
            for ours, theirs in _LIMITS.items():
                if isinstance(node.get(ours), (int, float)):
                    node[theirs] = node.pop(ours)
            for child in node.values():
                rename(child)
        elif isinstance(node, list):
            for child in node:
                rename(child)

    rename(schema)
    for name, node in schema["properties"].items():
        node.update(_STRICTER.get(name, {}))
        if node.get("x-tandem") == REFUSED:
            node["enum"] = _NEUTRAL + ([node["x-neutral"]] if "x-neutral" in node else [])
    return schema


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """The document, built once."""
    if app.openapi_schema is None:
        document = get_openapi(title="Tandem", version=__version__, routes=app.routes, openapi_version="3.1.0")
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(ANSWERS)
        for name, model in _BODIES.items():
            schema = json_schema(model)
            schemas.update(schema.pop("$defs", {}))
            schemas[name] = schema
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        for path in document["paths"].values():
            for operation in path.values():
                # Bad values are 400 here, never FastAPI's 422.
                operation["responses"].pop("422", None)
        app.openapi_schema = document
    return app.openapi_schema
