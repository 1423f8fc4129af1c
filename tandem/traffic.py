"""Logged traffic: token ids of finished requests in a directory, for those who opt in, to train drafts from.

Files `traffic-*.jsonl`, whose names sort by age, mode 0600: they are users' text. The first line of each says which
model and tokenizer the ids are of, the others are one request each: `{"prompt": [ids], "outputs": [[ids], …],
"temperature": t, "seed": s}`, one output per choice, in order.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

log = logging.getLogger(__name__)

FORMAT = "tandem traffic"
VERSION = 1
PATTERN = "traffic-*.jsonl"
# A directory holds about so many files when it is full.
_FILES = 8
_MIN_FILE_BYTES = 4_096
# Requests that wait for the writer; more are dropped.
_QUEUE = 512
# Ids that are written at once.
_PIECE = 1_000
# A line that is longer is no request of any model.
_MAX_LINE_BYTES = 64 << 20


class TrafficError(ValueError):
    """A file that is no log of traffic, or one of another model; the message names it and the line."""


@dataclass(frozen=True, slots=True)
class Header:
    """Whose token ids they are."""

    model_digest: str
    tokenizer_digest: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished request; outputs by choice."""

    prompt: Sequence[int]
    outputs: Sequence[Sequence[int]]
    temperature: float
    seed: int

    def line(self) -> bytes:
        """The entry as it is written."""
        outputs = ",".join(f"[{_numbers(ids)}]" for ids in self.outputs)
        rest = f'"temperature":{json.dumps(float(self.temperature))},"seed":{self.seed}'
        return f'{{"prompt":[{_numbers(self.prompt)}],"outputs":[{outputs}],{rest}}}\n'.encode()


def _numbers(ids: Sequence[int]) -> str:
    """In pieces: other threads of the process must not wait while a long prompt is written."""
    pieces = (ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE))
    return ",".join(",".join(map(str, piece)) for piece in pieces)


@dataclass(slots=True)
class TrafficStats:
    """Since the start: requests and bytes written, and requests that were not (too many at once, or a full disk)."""

    written: int = 0
    bytes: int = 0
    dropped: int = 0


def prepare(folder: Path) -> None:
    """Makes the directory, for its owner alone if it is new. Raises OSError if nothing can be written there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} cannot be written")


class TrafficLog:
    """Writes requests in a thread of its own. Never blocks and never raises for whoever offers them."""

    def __init__(self, folder: Path, header: Header, max_bytes: int) -> None:
        """max_bytes: the newest files of the directory are kept, up to this in all. Raises OSError: see `prepare`."""
        prepare(folder)
        self._folder, self._header, self._max = folder, header, max_bytes
        self._file_bytes = max(_MIN_FILE_BYTES, max_bytes // _FILES)
        self._file: BinaryIO | None = None
        self._size = 0
        self._failing = False
        self.stats = TrafficStats()
        self._queue: queue.Queue[Entry | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._run, name="traffic-log", daemon=True)
        self._thread.start()

    def offer(self, entry: Entry) -> None:
        """Hands a request over; its lists must not change any more."""
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self.stats.dropped += 1

    def close(self, patience_s: float = 2.0) -> None:
        """Writes what waits, for at most so long."""
        deadline = time.monotonic() + patience_s
        try:
            self._queue.put(None, timeout=patience_s)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))

    # The thread.

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                self._write(entry.line())
                self._failing = False
            except OSError as error:
                self.stats.dropped += 1
                self._leave()
                if not self._failing:
                    log.warning("traffic cannot be logged", extra={"reason": str(error)})
                    self._failing = True
        self._leave()

    def _write(self, line: bytes) -> None:
        if len(line) > self._file_bytes:
            self.stats.dropped += 1
            return
        if self._file is None or self._size + len(line) > self._file_bytes:
            self._rotate()
        assert self._file is not None
        self._file.write(line)
        self._size += len(line)
        self.stats.written += 1
        self.stats.bytes += len(line)
        if self._queue.empty():
            self._file.flush()

    def _rotate(self) -> None:
        """Begins a new file, once the oldest have made room for it."""
        self._leave()
        self._prune(self._max - self._file_bytes)
        name = f"traffic-{time.time_ns() // 1_000:017d}-{secrets.token_hex(4)}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.fdopen(os.open(self._folder / name, flags, 0o600), "wb")
        header = {"format": FORMAT, "version": VERSION, **asdict(self._header)}
        self._size = self._file.write(json.dumps(header).encode() + b"\n")

    def _prune(self, keep: int) -> None:
        """Removes the oldest files until at most `keep` bytes are left."""
        sizes: list[tuple[Path, int]] = []
        for path in sorted(self._folder.glob(PATTERN), reverse=True):
            try:
                sizes.append((path, path.stat().st_size))
            except FileNotFoundError:
                continue
        total = 0
        for path, size in sizes:
            total += size
            if total > keep:
                path.unlink(missing_ok=True)

    def _leave(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                log.warning("the end of a traffic file was lost", extra={"file": file.name})


def read(folder: Path, header: Header | None = None) -> Iterator[Entry]:
    """Requests of a directory, oldest first. What was cut off at the very end of a file is left out.

    header: the model that they must be of; None: any.

    Raises:
        TrafficError: there is no file, one is broken, or one is of another model.
    """
    files = sorted(folder.glob(PATTERN)) if folder.is_dir() else []
    if not files:
        raise TrafficError(f"{folder} has no files {PATTERN}")
    for path in files:
        try:
            with path.open("rb") as file:
                yield from _entries(path, file, header)
        except FileNotFoundError:
            # An engine that writes here has just made room.
            continue
        except OSError as error:
            raise TrafficError(f"{path} cannot be read: {error}") from error


def _entries(path: Path, file: BinaryIO, header: Header | None) -> Iterator[Entry]:
    vocab = 0
    for number, line in enumerate(_lines(path, file), start=1):
        where = f"{path}, line {number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise TrafficError(f"{where}: no JSON: {error}") from error
        if not isinstance(found, dict):
            raise TrafficError(f"{where}: no object")
        if number == 1:
            vocab = _check_header(where, found, header)
        else:
            yield _entry(where, found, vocab)


def _lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Whole lines: an engine that was killed may have left the last one half-written."""
    number = 0
    while line := file.readline(_MAX_LINE_BYTES):
        number += 1
        if not line.endswith(b"\n"):
            if len(line) == _MAX_LINE_BYTES:
                raise TrafficError(f"{path}, line {number}: longer than {_MAX_LINE_BYTES} bytes")
            return
        yield line


def _check_header(where: str, found: dict[str, Any], wanted: Header | None) -> int:
    """The vocabulary's size."""
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise TrafficError(
            f"{where}: format is {found.get('format')!r}, version {found.get('version')!r}, "
            f"but must be {FORMAT!r}, version {VERSION}"
        )
    vocab = found.get("vocab_size")
    if not _whole(vocab) or vocab < 1:
        raise TrafficError(f"{where}: vocab_size is {vocab!r}")
    for name, value in asdict(wanted).items() if wanted is not None else ():
        if found.get(name) != value:
            raise TrafficError(f"{where}: {name} is {found.get(name)!r}, but the target's is {value!r}")
    return int(vocab)


def _entry(where: str, found: dict[str, Any], vocab: int) -> Entry:
    prompt, outputs = found.get("prompt"), found.get("outputs")
    temperature, seed = found.get("temperature"), found.get("seed")
    if not _ids(prompt, vocab) or not prompt:
        raise TrafficError(f"{where}: prompt is no list of ids below {vocab}")
    if not isinstance(outputs, list) or not outputs or not all(_ids(ids, vocab) for ids in outputs):
        raise TrafficError(f"{where}: outputs are no lists of ids below {vocab}")
    if not isinstance(temperature, (int, float)) or isinstance(temperature, bool) or not math.isfinite(temperature):
        raise TrafficError(f"{where}: temperature is {temperature!r}")
    if temperature < 0:
        raise TrafficError(f"{where}: temperature is {temperature!r}")
    if not _whole(seed) or not 0 <= seed < 2**64:
        raise TrafficError(f"{where}: seed is {seed!r}")
    return Entry(prompt, outputs, float(temperature), seed)


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(value: object, vocab: int) -> bool:
    return isinstance(value, list) and all(_whole(token) and 0 <= token < vocab for token in value)
