"""DeepSeek V3 and R1: calls between special marks, the arguments as JSON (R1 fences them)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.tools.base import Content, Piece, partial_suffix
from gateway.tools.modes import ModeParser

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
_MARKS = (CALLS_BEGIN, CALL_BEGIN)


class DeepSeekParser(ModeParser):
    """See OutputParser.

    R1 and V3 write  begin "function" sep name newline fence json fence end;  V3.1 writes  begin name sep json end.
    """

    after_args = "tail"

    def _modes(self) -> Mapping[str, Callable[[], list[Piece]]]:
        return {"text": self._in_text, "head": self._in_head, "args": self._in_args, "tail": self._in_tail}

    def _in_text(self) -> list[Piece]:
        for mark in _MARKS:
            at = self._held.find(mark)
            if at >= 0:
                pieces = self._take_text(at)
                self._held = self._held.removeprefix(CALLS_BEGIN)
                self._mode = "tail"
                return pieces
        return self._take_text(len(self._held) - max(partial_suffix(self._held, mark) for mark in _MARKS))

    def _in_tail(self) -> list[Piece]:
        """Between calls: the next call, or the end of all."""
        rest = self._held.lstrip()
        for mark in (CALL_END, "```"):
            rest = rest.removeprefix(mark).lstrip()
        if rest.startswith(CALL_BEGIN):
            self._held, self._mode = rest[len(CALL_BEGIN) :], "head"
        elif rest.startswith(CALLS_END):
            self._held, self._mode = rest[len(CALLS_END) :], "text"
        return []

    def _in_head(self) -> list[Piece]:
        brace = self._held.find("{")
        if SEP not in self._held or brace < 0:
            return []
        left, right = self._held[:brace].split(SEP, 1)
        name = left.strip()
        if name == "function" and right.strip() and name not in self._context.names:
            name = right.split("```", 1)[0].strip()
        if name not in self._context.names:
            self._mode = "text"
            return []
        self._held = self._held[brace:]
        return self._begin_call(name)

    def finish(self) -> list[Piece]:
        text = self._held if self._mode == "text" else ""
        self._held = ""
        return [Content(text)] if text else []
