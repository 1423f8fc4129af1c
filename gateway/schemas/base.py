"""What all request schemas share: strict numbers, null as default, and fields that are refused or without effect."""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gateway.errors import ApiError, bad, unsupported

log = logging.getLogger("gateway.schemas")

REFUSED = "refused"
NO_EFFECT = "no effect"
EXTENSION = "extension"
STORE = "false keeps the request out of logged traffic and of what drafts learn"


def _integral(value: Any) -> Any:
    """Some clients write 16 as 16.0; that is the same number."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


Int = Annotated[int, BeforeValidator(_integral)]


def refused(why: str) -> Any:
    """A known field that would change the answer and that this server cannot honour."""
    return Field(None, description=f"Refused: {why}.", json_schema_extra={"x-tandem": REFUSED, "x-why": why})


def no_effect(why: str = "accepted, without effect") -> Any:
    """A known field that changes nothing here."""
    return Field(None, description=why.capitalize() + ".", json_schema_extra={"x-tandem": NO_EFFECT})


def extension(description: str, **limits: Any) -> Any:
    """A field that OpenAI does not have."""
    return Field(None, description=description, json_schema_extra={"x-tandem": EXTENSION}, **limits)


class Part(BaseModel):
    """A nested object of a request. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Body(BaseModel):
    """A request body. null means the default; unknown fields are ignored and logged once."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    _logged: ClassVar[set[str]] = set()


def field_kind(model: type[Body], name: str) -> str:
    """supported, extension, no effect or refused."""
    extra = model.model_fields[name].json_schema_extra
    return str(extra.get("x-tandem", "supported")) if isinstance(extra, dict) else "supported"


B = TypeVar("B", bound=Body)


def validate(model: type[B], data: Any) -> B:
    """Checks a parsed body.

    Raises:
        ApiError: 400 that names the field, the value and what is allowed.
    """
    if not isinstance(data, dict):
        raise bad(f"The body must be a JSON object, not {_json_kind(data)}.", code="invalid_json")
    given = {key: value for key, value in data.items() if value is not None}
    fields = model.model_fields
    for key in given:
        if key not in fields:
            _log_unknown(model, key)
        elif field_kind(model, key) == REFUSED:
            extra = fields[key].json_schema_extra
            _refuse(key, given[key], extra if isinstance(extra, dict) else {})
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise from_validation(error, model.model_fields) from None
    except RecursionError:
        raise bad("The body is nested too deeply.", code="invalid_json") from None


def _refuse(key: str, value: Any, extra: dict[str, Any]) -> None:
    if value in (False, [], {}, "") or value == extra.get("x-neutral"):
        return
    raise unsupported(key, str(extra.get("x-why", "this server does not offer it")))


def _log_unknown(model: type[Body], key: str) -> None:
    shown = key[:64]
    mark = f"{model.__name__}.{shown}"
    if mark not in Body._logged and len(Body._logged) < 1000:
        Body._logged.add(mark)
        log.info("unknown request field is ignored", extra={"field": shown, "schema": model.__name__})


def _json_kind(value: Any) -> str:
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        return "a string"
    return "null" if value is None else "a number or boolean"


_KIND_TAGS = {"str", "int", "float", "bool", "function-before", "constrained-str", "constrained-int"}


def _path(loc: tuple[int | str, ...]) -> str:
    """messages[0].content from a pydantic location, without the tags that unions put in."""
    path = ""
    for item in loc:
        if isinstance(item, int):
            path += f"[{item}]"
        elif item in _KIND_TAGS or "[" in item or "-" in item or item[:1].isupper():
            continue
        else:
            path += f".{item}" if path else item
    return path


def from_validation(error: ValidationError, fields: Container[str] = ()) -> ApiError:
    """OpenAI's 400 for the first thing that is wrong."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    if first["type"] == "string_type" and isinstance(first["input"], list):
        # "text or a list": what is wrong inside the list says more than that a list is no text.
        place = first["loc"][:-1]
        first = next((e for e in errors if e["loc"][: len(place)] == place and len(e["loc"]) > len(place) + 1), first)
    param = _path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if not param and (word := message.split(" ", 1)[0]) in fields:
        # A rule over several fields starts with the name of the one to blame.
        return bad(f"{message}.", word)
    if first["type"] == "missing":
        return bad(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    shown = repr(first.get("input"))
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return bad(f"Invalid value for '{param or 'body'}': {message} (got {shown}).", param or None, "invalid_value")
