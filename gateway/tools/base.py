"""What parsers produce, and what they share."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

_ALNUM = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. Calls are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArgs:
    """More of a call's arguments, a piece of JSON text."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArgs


class OutputParser(Protocol):
    """Splits one choice's text into pieces as it arrives."""

    def feed(self, text: str) -> list[Piece]:
        """Pieces that the new text completes."""
        ...

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text."""
        ...


def call_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """Nine letters or digits, which Mistral's templates insist on."""
    return "".join(secrets.choice(_ALNUM) for _ in range(9))


@dataclass(slots=True)
class ToolContext:
    """What a parser must know of the request."""

    names: frozenset[str]
    parallel: bool = True
    make_id: Callable[[], str] = field(default=call_id)


def partial_suffix(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class JsonScanner:
    """Follows one JSON object as it arrives, without parsing it again and again.

    `start` and `end` delimit the object in `text` (end is -1 until it is closed). Values of the top level are known by
    key: `values[key]` = (start, end or -1). `broken` is set when the text cannot be the beginning of an object.
    """

    def __init__(self) -> None:
        self.text = ""
        self.start = -1
        self.end = -1
        self.broken = False
        self.values: dict[str, tuple[int, int]] = {}
        self._pos = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._string_at = 0
        self._key: str | None = None
        self._value_at = -1

    def feed(self, text: str) -> None:
        self.text += text
        while self._pos < len(self.text) and self.end < 0 and not self.broken:
            self._step(self.text[self._pos])
            self._pos += 1

    def _step(self, char: str) -> None:
        if self._in_string:
            self._string_step(char)
        elif self.start < 0:
            if char == "{":
                self.start, self._depth = self._pos, 1
            elif not char.isspace():
                self.broken = True
        elif char == '"':
            self._in_string, self._string_at = True, self._pos
            self._begin_value()
        elif char in "{[":
            self._begin_value()
            self._depth += 1
        elif char in "}]":
            if self._depth == 1:
                self._end_value()
                self.end = self._pos + 1
            self._depth -= 1
        elif self._depth == 1 and char == ",":
            self._end_value()
        elif not char.isspace() and char != ":":
            self._begin_value()

    def _string_step(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and self._key is None:
                try:
                    self._key = str(json.loads(self.text[self._string_at : self._pos + 1]))
                except ValueError:
                    self.broken = True

    def _begin_value(self) -> None:
        if self._depth == 1 and self._key is not None and self._value_at < 0:
            self._value_at = self._pos
            self.values[self._key] = (self._pos, -1)

    def _end_value(self) -> None:
        if self._key is not None and self._value_at >= 0:
            raw = self.text[self._value_at : self._pos]
            self.values[self._key] = (self._value_at, self._value_at + len(raw.rstrip()))
        self._key, self._value_at = None, -1

    def value(self, *keys: str) -> tuple[str, bool] | None:
        """Raw text of the first of these top-level values that has begun, and whether it is complete."""
        for key in keys:
            if key in self.values:
                start, end = self.values[key]
                if end >= 0:
                    return self.text[start:end], True
                # Space before a comma or brace is not part of the value, so it waits.
                return self.text[start : self._pos].rstrip(), False
        return None

    @property
    def taken(self) -> int:
        """Characters followed so far: all, or those up to the object's end or to where it broke."""
        return self._pos

    @property
    def rest(self) -> str:
        """Text behind the object, or behind the place where it broke."""
        return self.text[self.taken :]


def is_object(text: str) -> bool:
    """True if the text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class CallEmitter:
    """Turns a {"name": …, "arguments": {…}} object that grows into CallStart and CallArgs."""

    def __init__(self, context: ToolContext, index: int) -> None:
        self.scanner = JsonScanner()
        self.started = False
        self._context = context
        self._index = index
        self._sent = 0

    @property
    def refused(self) -> bool:
        """True when this is no call of a known tool, so its text belongs to the reader."""
        if self.started:
            return False
        if self.scanner.broken:
            return True
        name = self._name()
        if name is not None and name not in self._context.names:
            return True
        # Complete, and still not a call.
        return self.scanner.end >= 0

    def _name(self) -> str | None:
        found = self.scanner.value("name")
        if found is None or not found[1]:
            return None
        try:
            name = json.loads(found[0])
        except ValueError:
            return ""
        return name if isinstance(name, str) else ""

    def feed(self, text: str) -> list[Piece]:
        """Pieces of the call that the text completes."""
        self.scanner.feed(text)
        pieces: list[Piece] = []
        name = self._name()
        if name is None or name not in self._context.names or self.scanner.broken:
            return pieces
        arguments = self.scanner.value("arguments", "parameters")
        if arguments is None:
            if self.scanner.end >= 0 and not self.started:
                self.started = True
                return [CallStart(self._index, self._context.make_id(), name), CallArgs(self._index, "{}")]
            return pieces
        raw, _ = arguments
        if not raw.startswith("{"):
            return pieces
        if not self.started:
            self.started = True
            pieces.append(CallStart(self._index, self._context.make_id(), name))
        if len(raw) > self._sent:
            pieces.append(CallArgs(self._index, raw[self._sent :]))
            self._sent = len(raw)
        return pieces
