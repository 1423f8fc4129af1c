"""Reasoning between <think> and </think>, split from the answer that follows."""

from __future__ import annotations

from gateway.tools.base import Content, OutputParser, Piece, Reasoning, partial_suffix

OPEN = "<think>"
CLOSE = "</think>"


class ThinkParser:
    """See OutputParser. What follows the reasoning goes to the inner parser, if there is one."""

    def __init__(self, inner: OutputParser | None = None, opened: bool = False) -> None:
        # `opened`: the prompt itself ends with the opening tag, as some templates write it.
        self._inner = inner
        self._mode = "reasoning" if opened else "start"
        self._held = ""
        self._first = True

    def feed(self, text: str) -> list[Piece]:
        if self._mode == "answer":
            return self._answer(text)
        self._held += text
        if self._mode == "start":
            rest = self._held.lstrip()
            if OPEN.startswith(rest):
                if rest != OPEN:
                    return []
                self._held, self._mode = "", "reasoning"
            elif rest.startswith(OPEN):
                self._held, self._mode = rest[len(OPEN) :], "reasoning"
            else:
                self._mode = "answer"
                text, self._held = self._held, ""
                self._first = False
                return self._answer(text)
        return self._in_reasoning()

    def _in_reasoning(self) -> list[Piece]:
        at = self._held.find(CLOSE)
        if at < 0:
            keep = partial_suffix(self._held, CLOSE)
            text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            return [Reasoning(text)] if text else []
        text, rest = self._held[:at], self._held[at + len(CLOSE) :]
        self._held, self._mode = "", "answer"
        pieces: list[Piece] = [Reasoning(text)] if text else []
        return pieces + self._answer(rest)

    def _answer(self, text: str) -> list[Piece]:
        if self._first:
            # Line breaks between the closing tag and the answer belong to neither.
            text = text.lstrip("\n")
            self._first = not text
        if not text:
            return []
        return self._inner.feed(text) if self._inner else [Content(text)]

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._held:
            pieces.append(Reasoning(self._held) if self._mode == "reasoning" else Content(self._held))
            self._held = ""
        return pieces + (self._inner.finish() if self._inner else [])
