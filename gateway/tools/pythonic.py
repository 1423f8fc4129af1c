"""Pythonic calls (Llama 4, Llama 3.2): the whole answer is [name(key=value, …), …] in Python's syntax."""

from __future__ import annotations

import ast
import json
from typing import Any

from gateway.tools.base import CallArgs, CallStart, Content, Piece, ToolContext

MAX_TEXT = 64 * 1024


class PythonicParser:
    """See OutputParser. Calls are known when the list is whole, so they come at the end."""

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        self._held = ""
        self._plain = False

    def feed(self, text: str) -> list[Piece]:
        if not self._plain:
            self._held += text
            start = self._held.lstrip()
            if not start or (start.startswith("[") and len(self._held) <= MAX_TEXT):
                return []
            self._plain = True
            text, self._held = self._held, ""
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        text, self._held = self._held, ""
        calls = parse_calls(text.strip(), self._context.names)
        if calls is None:
            return [Content(text)] if text else []
        pieces: list[Piece] = []
        for index, (name, arguments) in enumerate(calls):
            pieces.append(CallStart(index, self._context.make_id(), name))
            pieces.append(CallArgs(index, json.dumps(arguments, ensure_ascii=False)))
        return pieces


def parse_calls(text: str, names: frozenset[str]) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls of a list of them; None if the text is anything else. Nothing is evaluated but literals."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(tree, ast.List) or not tree.elts:
        return None
    calls: list[tuple[str, dict[str, Any]]] = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args:
            return None
        name = ast.unparse(node.func)
        if name not in names:
            return None
        try:
            arguments = {keyword.arg: _literal(keyword.value) for keyword in node.keywords if keyword.arg}
        except (ValueError, TypeError, RecursionError):
            return None
        calls.append((name, arguments))
    return calls


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """A literal value; JSON's own words are taken too, because models mix them in."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {str(ast.literal_eval(k)): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k}
    value = ast.literal_eval(node)
    json.dumps(value)
    return value
