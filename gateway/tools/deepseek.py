"""DeepSeek V3 and R1: calls between special marks, the arguments as JSON (R1 fences them)."""

from __future__ import annotations

from gateway.tools.base import (
    CallArgs,
    CallStart,
    Content,
    JsonScanner,
    Piece,
    ToolContext,
    partial_suffix,
)

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
_MARKS = (CALLS_BEGIN, CALL_BEGIN)


class DeepSeekParser:
    """See OutputParser.

    R1 and V3 write  begin "function" sep name newline fence json fence end;  V3.1 writes  begin name sep json end.
    """

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        self._held = ""
        self._mode = "text"
        self._args: JsonScanner | None = None
        self._sent = 0
        self._count = 0

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        moved = True
        while moved:
            before = (self._mode, len(self._held), self._count)
            step = {"text": self._in_text, "head": self._in_head, "args": self._in_args, "tail": self._in_tail}
            pieces += step[self._mode]()
            moved = before != (self._mode, len(self._held), self._count)
        return pieces

    def _in_text(self) -> list[Piece]:
        for mark in _MARKS:
            at = self._held.find(mark)
            if at >= 0:
                text, self._held = self._held[:at], self._held[at:]
                self._held = self._held.removeprefix(CALLS_BEGIN)
                self._mode = "tail"
                return [Content(text)] if text else []
        keep = max(partial_suffix(self._held, mark) for mark in _MARKS)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return [Content(text)] if text else []

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
        self._held, self._mode = self._held[brace:], "args"
        self._args, self._sent = JsonScanner(), 0
        return [CallStart(self._count, self._context.make_id(), name)]

    def _in_args(self) -> list[Piece]:
        scanner = self._args
        assert scanner is not None
        scanner.feed(self._held)
        self._held = ""
        stop = scanner.end if scanner.end >= 0 else len(scanner.text)
        text = scanner.text[self._sent : stop]
        self._sent += len(text)
        if scanner.end >= 0:
            self._held, self._mode, self._args = scanner.rest, "tail", None
            self._count += 1
            return [CallArgs(self._count - 1, text)] if text else []
        return [CallArgs(self._count, text)] if text else []

    def finish(self) -> list[Piece]:
        text = self._held if self._mode == "text" else ""
        self._held = ""
        return [Content(text)] if text else []
