"""Hermes and Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number, between plain text."""

from __future__ import annotations

from gateway.tools.base import CallEmitter, Content, Piece, ToolContext, partial_suffix

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser:
    """See OutputParser."""

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        self._held = ""
        self._call: CallEmitter | None = None
        self._closing = False
        self._count = 0

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            before = (len(self._held), self._call, self._closing)
            if self._closing:
                self._close()
            elif self._call is not None:
                pieces += self._in_call()
            else:
                pieces += self._in_text()
            if before == (len(self._held), self._call, self._closing):
                break
        return pieces

    def _in_text(self) -> list[Piece]:
        at = self._held.find(OPEN)
        if at < 0:
            keep = partial_suffix(self._held, OPEN)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            return [Content(text)] if text else []
        text, self._held = self._held[:at], self._held[at + len(OPEN) :]
        self._call = CallEmitter(self._context, self._count)
        return [Content(text)] if text else []

    def _in_call(self) -> list[Piece]:
        call = self._call
        assert call is not None
        text, self._held = self._held, ""
        pieces = call.feed(text)
        if call.refused:
            self._call = None
            # Not a call after all: the reader gets what the model wrote. The tag itself goes with it.
            self._held = call.scanner.text
            first = self._held[:1]
            self._held = self._held[1:]
            return [Content(OPEN + first)]
        if call.scanner.end >= 0:
            self._held = call.scanner.rest
            self._closing = True
            self._call = None
            self._count += 1
        return pieces

    def _close(self) -> None:
        """Skips to behind the closing tag, or to the next opening one where the model forgot it."""
        stripped = self._held.lstrip()
        if stripped.startswith(CLOSE):
            self._held = stripped[len(CLOSE) :].lstrip("\n")
            self._closing = False
        elif not CLOSE.startswith(stripped):
            self._held = stripped
            self._closing = False

    def finish(self) -> list[Piece]:
        if self._call is not None and not self._call.started:
            text, self._call = OPEN + self._call.scanner.text, None
            return [Content(text)]
        text, self._held = ("" if self._closing else self._held), ""
        return [Content(text)] if text else []
