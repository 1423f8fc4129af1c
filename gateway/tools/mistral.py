"""Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], and the later form [TOOL_CALLS]name[ARGS]{…}."""

from __future__ import annotations

from gateway.tools.base import (
    CallArgs,
    CallEmitter,
    CallStart,
    Content,
    JsonScanner,
    Piece,
    ToolContext,
    partial_suffix,
    short_call_id,
)

MARK = "[TOOL_CALLS]"
ARGS = "[ARGS]"


class MistralParser:
    """See OutputParser."""

    def __init__(self, context: ToolContext) -> None:
        context.make_id = short_call_id
        self._context = context
        self._held = ""
        self._mode = "text"
        self._call: CallEmitter | None = None
        self._args: JsonScanner | None = None
        self._sent = 0
        self._count = 0

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        moved = True
        while moved:
            before = (self._mode, len(self._held), self._count)
            pieces += {"text": self._in_text, "head": self._in_head, "list": self._in_list, "args": self._in_args}[
                self._mode
            ]()
            moved = before != (self._mode, len(self._held), self._count)
        return pieces

    def _in_text(self) -> list[Piece]:
        at = self._held.find(MARK)
        if at >= 0:
            text, self._held, self._mode = self._held[:at], self._held[at + len(MARK) :], "head"
        else:
            keep = partial_suffix(self._held, MARK)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return [Content(text)] if text else []

    def _in_head(self) -> list[Piece]:
        """Tells the two forms apart."""
        rest = self._held.lstrip()
        if not rest:
            return []
        if rest[0] in "[{":
            self._held, self._mode = rest.lstrip("["), "list"
            return []
        at, brace = rest.find(ARGS), rest.find("{")
        if at < 0 and brace < 0:
            return []
        name = rest[: at if at >= 0 else brace].strip()
        if name not in self._context.names:
            self._held, self._mode = rest, "text"
            return [Content(MARK)]
        self._held = rest[at + len(ARGS) :] if at >= 0 else rest[brace:]
        self._mode, self._args, self._sent = "args", JsonScanner(), 0
        return [CallStart(self._count, self._context.make_id(), name)]

    def _in_args(self) -> list[Piece]:
        scanner = self._args
        assert scanner is not None
        scanner.feed(self._held)
        self._held = ""
        stop = scanner.end if scanner.end >= 0 else len(scanner.text)
        start = max(scanner.start, 0) + self._sent
        text = scanner.text[start:stop] if scanner.start >= 0 else ""
        self._sent += len(text)
        pieces: list[Piece] = [CallArgs(self._count, text)] if text else []
        if scanner.end >= 0 or scanner.broken:
            self._held = scanner.rest
            self._mode, self._args = "text", None
            self._count += 1
        return pieces

    def _in_list(self) -> list[Piece]:
        if self._call is None:
            rest = self._held.lstrip(" \n,")
            if rest.startswith("]"):
                self._held, self._mode = rest[1:].lstrip(), "text"
                return []
            if not rest:
                return []
            self._call, self._held = CallEmitter(self._context, self._count), rest
        text, self._held = self._held, ""
        pieces = self._call.feed(text)
        if self._call.refused:
            self._held, self._mode = self._call.scanner.text, "text"
            self._call = None
        elif self._call.scanner.end >= 0:
            self._held, self._call = self._call.scanner.rest, None
            self._count += 1
        return pieces

    def finish(self) -> list[Piece]:
        text = self._held
        if self._call is not None and not self._call.started:
            text = self._call.scanner.text + text
        elif self._mode in ("list", "args"):
            text = ""
        self._held = ""
        return [Content(text)] if text.strip() else []
