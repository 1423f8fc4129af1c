"""Turning a growing list of ids into text without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tandem.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Holds the undecoded bytes of one output. `push` returns whole characters only; `flush` ends the text.

    The texts returned by push and flush, joined, equal Tokenizer.decode of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_token_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that the ids complete."""
        token_bytes = self._tokenizer.token_bytes
        return self._decoder.decode(b"".join(token_bytes(token) for token in ids if token not in self._skipped))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a cut-off character, else nothing."""
        return self._decoder.decode(b"", final=True)

    @property
    def pending(self) -> bool:
        """True while bytes of an unfinished character are held back."""
        return bool(self._decoder.getstate()[0])
