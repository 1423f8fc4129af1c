"""Llama 3.1 and later: the whole answer is one or more {"name": …, "parameters": {…}} objects, separated by ;."""

from __future__ import annotations

from gateway.tools.base import CallEmitter, Content, Piece, ToolContext

TAG = "<|python_tag|>"


class Llama3Parser:
    """See OutputParser. An answer that does not begin with an object is plain text to its end."""

    def __init__(self, context: ToolContext) -> None:
        self._context = context
        self._held = ""
        self._plain = False
        self._call: CallEmitter | None = None
        self._count = 0

    def feed(self, text: str) -> list[Piece]:
        if self._plain:
            return [Content(text)] if text else []
        self._held += text
        pieces: list[Piece] = []
        while self._held and not self._plain:
            if self._call is None and not self._begin():
                break
            if self._call is not None:
                pieces += self._in_call()
        if self._plain and self._held:
            pieces.append(Content(self._held))
            self._held = ""
        return pieces

    def _begin(self) -> bool:
        """Looks at what comes next; False while that cannot be told."""
        rest = self._held.lstrip()
        if self._count:
            rest = rest.lstrip("; \n")
        if not rest or (len(rest) < len(TAG) and TAG.startswith(rest)):
            return False
        if rest.startswith(TAG):
            rest = rest[len(TAG) :].lstrip()
            if not rest:
                return False
        if rest.startswith("{"):
            self._call = CallEmitter(self._context, self._count)
            self._held = rest
        else:
            self._plain = True
        return True

    def _in_call(self) -> list[Piece]:
        call = self._call
        assert call is not None
        text, self._held = self._held, ""
        pieces = call.feed(text)
        if call.refused:
            self._plain, self._call = True, None
            self._held = call.scanner.text
        elif call.scanner.end >= 0:
            self._held, self._call = call.scanner.rest, None
            self._count += 1
        return pieces

    def finish(self) -> list[Piece]:
        text = self._held
        if self._call is not None and not self._call.started:
            text = self._call.scanner.text + text
        self._held, self._call = "", None
        return [Content(text)] if text.strip() else []
