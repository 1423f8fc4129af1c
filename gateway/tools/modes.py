"""What parsers of marked calls share: one mode at a time until nothing moves, and arguments passed on as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.tools.base import CallArgs, CallStart, Content, JsonScanner, Piece, ToolContext


class ModeParser:
    """A parser whose modes each take what they can from `_held`, and say with `_mode` who goes on.

    A subclass gives `_modes` (name to method); "text" is the mode outside calls, "args" (here) passes a call's JSON on
    and goes over to `after_args`.
    """

    after_args = "text"

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        self._held = ""
        self._mode = "text"
        self._count = 0
        self._args = JsonScanner()
        self._sent = 0

    def _modes(self) -> Mapping[str, Callable[[], list[Piece]]]:
        raise NotImplementedError

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        modes = self._modes()
        pieces: list[Piece] = []
        moved = True
        while moved:
            before = (self._mode, len(self._held), self._count)
            pieces += modes[self._mode]()
            moved = before != (self._mode, len(self._held), self._count)
        return pieces

    def _take_text(self, count: int) -> list[Piece]:
        """Passes the first `count` held characters on as content."""
        text, self._held = self._held[:count], self._held[count:]
        return [Content(text)] if text else []

    def _begin_call(self, name: str) -> list[Piece]:
        """Opens a call; what is held from here on are its arguments."""
        self._mode, self._args, self._sent = "args", JsonScanner(), 0
        return [CallStart(self._count, self._context.make_id(), name)]

    def _in_args(self) -> list[Piece]:
        scanner = self._args
        scanner.feed(self._held)
        self._held = ""
        start = max(scanner.start, 0) + self._sent
        # Before the opening brace there is only space; broken JSON is passed on as it is, so that nothing is lost.
        text = scanner.text[start : scanner.taken] if scanner.start >= 0 or scanner.broken else ""
        self._sent += len(text)
        pieces: list[Piece] = [CallArgs(self._count, text)] if text else []
        if scanner.end >= 0 or scanner.broken:
            self._held, self._mode = scanner.rest, self.after_args if scanner.end >= 0 else "text"
            self._count += 1
        return pieces
