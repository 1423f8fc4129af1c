"""Finished outputs on disk, for those who opt in: they are users' text, so the file is private to its owner."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path


class SuffixFile:
    """One JSON line per output: salt and ids, oldest first. Written as a whole when the service ends."""

    def __init__(self, path: Path, max_tokens: int) -> None:
        """max_tokens: the newest outputs are kept, up to so many ids in all."""
        self._path = path
        self._max_tokens = max_tokens
        self._outputs: deque[tuple[str, list[int]]] = deque()
        self._tokens = 0

    def read(self) -> Iterator[tuple[str, list[int]]]:
        """What is on disk; nothing if there is no file yet.

        Raises:
            OSError: it cannot be read. ValueError: a line is no such output; names the line.
        """
        if not self._path.exists():
            return
        for number, line in enumerate(self._path.read_text().splitlines(), start=1):
            try:
                entry = json.loads(line)
                salt, ids = str(entry["salt"]), [int(token) for token in entry["ids"]]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"line {number} is no learnt output") from error
            self.add(salt, ids)
            yield salt, ids

    def add(self, salt: str, ids: list[int]) -> None:
        self._outputs.append((salt, ids))
        self._tokens += len(ids)
        while self._tokens > self._max_tokens:
            self._tokens -= len(self._outputs.popleft()[1])

    def write(self) -> None:
        """Writes all outputs; another process never sees half of them. Raises OSError."""
        partial = self._path.with_name(self._path.name + ".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            for salt, ids in self._outputs:
                file.write(json.dumps({"salt": salt, "ids": ids}) + "\n")
        partial.replace(self._path)
