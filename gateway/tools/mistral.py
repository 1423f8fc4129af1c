"""Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], and the later form [TOOL_CALLS]name[ARGS]{…}."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.tools.base import CallEmitter, Content, Piece, ToolContext, partial_suffix, short_call_id
from gateway.tools.modes import ModeParser

MARK = "[TOOL_CALLS]"
ARGS = "[ARGS]"


class MistralParser(ModeParser):
    """See OutputParser."""

    def __init__(self, context: ToolContext) -> None:
        context.make_id = short_call_id
        super().__init__(context)
        self._call: CallEmitter | None = None

    def _modes(self) -> Mapping[str, Callable[[], list[Piece]]]:
        return {"text": self._in_text, "head": self._in_head, "list": self._in_list, "args": self._in_args}

    def _in_text(self) -> list[Piece]:
        at = self._held.find(MARK)
        if at < 0:
            return self._take_text(len(self._held) - partial_suffix(self._held, MARK))
        pieces = self._take_text(at)
        self._held, self._mode = self._held[len(MARK) :], "head"
        return pieces

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
        return self._begin_call(name)

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
