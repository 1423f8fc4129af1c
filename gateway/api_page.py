"""The tables of docs/api.md, written from the schemas that validate. `python -m gateway.api_page FILE` renews them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from gateway.docs import json_schema
from gateway.errors import REASONS
from gateway.schemas.base import Body, field_kind
from gateway.schemas.chat import ChatBody
from gateway.schemas.completions import CompletionBody
from gateway.schemas.messages import CountBody, MessagesBody
from gateway.schemas.responses import ResponsesBody
from gateway.schemas.tokens import DetokenizeBody, EmbeddingBody, TokenizeBody

BODIES: dict[str, type[Body]] = {
    model.__name__: model
    for model in (
        ChatBody,
        CompletionBody,
        ResponsesBody,
        MessagesBody,
        CountBody,
        EmbeddingBody,
        TokenizeBody,
        DetokenizeBody,
    )
}
_BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _values(schema: dict[str, Any]) -> str:
    """Type and limits of a field, for people."""
    if "anyOf" in schema:
        parts = [_values(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(part for part in parts if part))
    if "$ref" in schema:
        return "object"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", ""))
    if kind == "array":
        inner = _values(schema.get("items", {}))
        kind = f"list of {inner}" if inner else "list"
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    limits = [
        f"≥ {low}" if low is not None else "",
        f"> {above}" if above is not None else "",
        f"≤ {high}" if high is not None and abs(high) < 2**31 - 1 else "",
        f"< {below}" if below is not None and below < 2**31 else "",
    ]
    shown = ", ".join(limit for limit in limits if limit and "-9223372036854775808" not in limit)
    return f"{kind} {shown}".strip()


def field_table(model: type[Body]) -> str:
    """One row per field: name, kind, values, notes."""
    properties = json_schema(model)["properties"]
    required = {name for name, field in model.model_fields.items() if field.is_required()}
    rows = ["| field | | values | notes |", "|---|---|---|---|"]
    order = {"supported": 0, "extension": 1, "no effect": 2, "refused": 3}
    names = sorted(model.model_fields, key=lambda name: (order[field_kind(model, name)], name not in required, name))
    for name in names:
        kind = field_kind(model, name)
        if name in required:
            kind = "required"
        values = "" if kind in ("no effect", "refused") else _values(properties[name])
        notes = (model.model_fields[name].description or "").replace("|", "\\|")
        rows.append(f"| `{name}` | {kind} | {values} | {notes} |")
    return "\n".join(rows) + "\n"


def error_table() -> str:
    """One row per reason of the contract."""
    rows = ["| reason over gRPC | HTTP | `type` | `code` |", "|---|---|---|---|"]
    rows += [f"| {reason} | {status} | `{kind}` | `{code}` |" for reason, (status, kind, code) in REASONS.items()]
    return "\n".join(rows) + "\n"


def renew(text: str) -> str:
    """The page with all its tables as the code has them."""

    def block(match: re.Match[str]) -> str:
        name = match.group(2)
        table = error_table() if name == "errors" else field_table(BODIES[name])
        return f"{match.group(1)}{table}{match.group(3)}"

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(renew(page.read_text()))
