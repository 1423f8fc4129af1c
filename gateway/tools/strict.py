"""Grammars of `auto` with strict tools: free text, but a call that begins is one of a known tool.

Arguments of strict tools obey their schema, those of others are any object. Each grammar writes calls as the format's
parser reads them. Where a format's marks are special tokens of the checkpoint, the grammar names the tokens, and the
text may not spell them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from gateway.schemas.chat import Tool
from gateway.tools import deepseek, forced, hermes, llama3, mistral

IdOf = Callable[[str], int | None]

ANY = r"/(.|\n)*/"
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KEYWORD = re.compile(r"[A-Za-z_]\w*")


def strict_grammar(name: str, tools: list[Tool], template: str, id_of: IdOf) -> str | None:
    """Lark grammar for calls in the format `name`; None where no tool is strict."""
    if not any(tool.function.strict for tool in tools):
        return None
    return _FORMATS[name](tools, template, id_of)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(tool: Tool) -> dict[str, Any]:
    return forced.parameters_of(tool) if tool.function.strict else {"type": "object"}


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _STYLE}, ensure_ascii=False)


def _calls(tools: list[Tool], before: Callable[[str], str], after: str) -> list[str]:
    """Rules `call`, `call_0` …: an alternative per tool. before(name) and after are pieces of grammar."""
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        rules.append(f"call_{index}: {before(tool.function.name)} arguments_{index} {after}")
        rules.append(f"arguments_{index}: {_json(_schema(tool))}")
    return rules


def _grammar(*rules: str) -> str:
    return "\n".join(["%llguidance {}", *rules, ""])


def _without(*marks: str) -> str:
    """A terminal: text that spells none of the marks."""
    return " & ".join([ANY, *(f"~/(.|\\n)*{re.escape(mark)}(.|\\n)*/" for mark in marks)])


def _object_call(key: str) -> Callable[[str], str]:
    return lambda name: _quoted('{"name": ' + json.dumps(name) + f', "{key}": ')


def _hermes(tools: list[Tool], template: str, id_of: IdOf) -> str:
    def begin(name: str) -> str:
        return _quoted('\n{"name": ' + json.dumps(name) + ', "arguments": ')

    return _grammar(
        "start: part* TEXT",
        "part: opening call",
        f"opening[lazy]: TEXT {_quoted(hermes.OPEN)}",
        f"TEXT: {ANY}",
        *_calls(tools, begin, _quoted("}\n" + hermes.CLOSE)),
    )


def _llama3(tools: list[Tool], template: str, id_of: IdOf) -> str:
    tag = id_of(llama3.TAG)
    # The parser takes an answer for calls if it begins with an object, so text may not.
    return _grammar(
        f'start: PLAIN | {f"<[{tag}]>? " if tag is not None else ""}call ("; " call)*',
        rf"PLAIN: /\s*([^{{\s](.|\n)*)?/ & ~/\s*{re.escape(llama3.TAG)}(.|\n)*/",
        *_calls(tools, _object_call("parameters"), '"}"'),
    )


def _mistral(tools: list[Tool], template: str, id_of: IdOf) -> str:
    mark, args = id_of(mistral.MARK), id_of(mistral.ARGS)
    if mark is not None:
        opening = [f"opening: TEXT <[{mark}]>", f"TEXT: {_without(mistral.MARK)}"]
        again = f"<[{mark}]>"
    else:
        opening = [f"opening[lazy]: TEXT {_quoted(mistral.MARK)}", f"TEXT: {ANY}"]
        again = _quoted(mistral.MARK)
    if mistral.ARGS in template:
        between = f"<[{args}]>" if args is not None else _quoted(mistral.ARGS)
        calls = _calls(tools, lambda name: f"{_quoted(name)} {between}", "")
        return _grammar(f"start: TEXT | opening call ({again} call)*", *opening, *calls)
    calls = _calls(tools, _object_call("arguments"), '"}"')
    return _grammar('start: TEXT | opening "[" call (", " call)* "]"', *opening, *calls)


def _deepseek(tools: list[Tool], template: str, id_of: IdOf) -> str:
    def mark(text: str) -> str:
        token = id_of(text)
        return f"<[{token}]>" if token is not None else _quoted(text)

    fenced = "```json" in template

    def begin(name: str) -> str:
        if fenced:
            return f'"function" {mark(deepseek.SEP)} {_quoted(name + chr(10) + "```json" + chr(10))}'
        return f"{_quoted(name)} {mark(deepseek.SEP)}"

    end = mark(deepseek.CALL_END)
    special = id_of(deepseek.CALLS_BEGIN) is not None
    # Text may not spell the mark of a single call either: the parser would take it for one.
    marks = (deepseek.CALLS_BEGIN, deepseek.CALL_BEGIN) if special else (deepseek.CALL_BEGIN,)
    one = f"{mark(deepseek.CALL_BEGIN)} call"
    between = _quoted("\n") + "?"
    return _grammar(
        f"start: TEXT | opening {one} ({between} {one})* {mark(deepseek.CALLS_END)}",
        f"opening{'' if special else '[lazy]'}: TEXT {mark(deepseek.CALLS_BEGIN)}",
        f"TEXT: {_without(*marks)}",
        *_calls(tools, begin, _quoted("\n```") + " " + end if fenced else end),
    )


def _pythonic(tools: list[Tool], template: str, id_of: IdOf) -> str:
    """Values are JSON, which the parser reads beside Python's. Optional arguments may be left out from the last on."""
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        name = _quoted(tool.function.name + "(")
        if not tool.function.strict:
            rules.append(f'call_{index}: {name} (pair (", " pair)*)? ")"')
            continue
        schema = forced.parameters_of(tool)
        definitions: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        needed = set(schema.get("required", ()))
        properties = {key: value for key, value in schema.get("properties", {}).items() if _KEYWORD.fullmatch(key)}
        names = sorted(properties, key=lambda key: key not in needed)
        inner = ""
        for at in range(len(names) - 1, -1, -1):
            comma = '", " ' if at else ""
            piece = f"{comma}{_quoted(names[at] + '=')} value_{index}_{at} {inner}".rstrip()
            inner = piece if names[at] in needed else f"({piece})?"
            value = properties[names[at]]
            rules.append(f"value_{index}_{at}: {_json({**definitions, **(value if isinstance(value, dict) else {})})}")
        rules.append(f'call_{index}: {name} {inner} ")"')
    if not all(tool.function.strict for tool in tools):
        rules += ["pair: KEY any", r"KEY: /[A-Za-z_]\w*=/", f"any: {_json({})}"]
    return _grammar('start: PLAIN | "[" call (", " call)* "]"', r"PLAIN: /\s*([^\[\s](.|\n)*)?/", *rules)


_FORMATS: dict[str, Callable[[list[Tool], str, IdOf], str]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "pythonic": _pythonic,
}
