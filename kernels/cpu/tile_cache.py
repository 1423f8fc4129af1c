"""A file of weight tiles: written once, then mapped read-only and shared by all engines of a machine.

Layout: magic, header length (little-endian u64), JSON header, then each weight at a multiple of 4,096 bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernels.cpu.tiles import LAYOUT_VERSION, Kind, TileWeight, tile_bytes

_MAGIC = b"TANDEMT1"
_PAGE = 4096


@dataclass(frozen=True)
class Entry:
    """One weight to store: its name, shape and tile kind."""

    name: str
    n: int
    k: int
    kind: Kind

    @property
    def nbytes(self) -> int:
        return tile_bytes(self.kind, self.n, self.k)


def _offsets(entries: list[Entry], header: int) -> tuple[list[int], int]:
    at, places = -(-header // _PAGE) * _PAGE, []
    for entry in entries:
        places.append(at)
        at = -(-(at + entry.nbytes) // _PAGE) * _PAGE
    return places, at


def _header(entries: list[Entry]) -> bytes:
    rows = [[entry.name, entry.n, entry.k, int(entry.kind), entry.nbytes] for entry in entries]
    return json.dumps({"layout": LAYOUT_VERSION, "weights": rows}).encode()


def open_tiles(path: Path, entries: list[Entry]) -> dict[str, TileWeight] | None:
    """Maps a tile file read-only. None if it is missing, damaged, or holds other weights than `entries`."""
    expected = _header(entries)
    try:
        with path.open("rb") as file:
            start = file.read(16 + len(expected))
            places, size = _offsets(entries, 16 + len(expected))
            if start != _MAGIC + struct.pack("<Q", len(expected)) + expected or os.fstat(file.fileno()).st_size != size:
                return None
            mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
            _ask_for_huge_pages(mapped)
    except (OSError, ValueError):
        return None
    return _weights(entries, places, np.frombuffer(mapped, dtype=np.uint8))


def _weights(entries: list[Entry], places: list[int], data: np.ndarray) -> dict[str, TileWeight]:
    return {
        entry.name: TileWeight(data[at : at + entry.nbytes], entry.n, -(-entry.k // 32) * 32, entry.kind)
        for entry, at in zip(entries, places, strict=True)
    }


@contextmanager
def write_tiles(path: Path, entries: list[Entry]) -> Iterator[dict[str, np.ndarray]]:
    """Yields a writable uint8 buffer per weight; the file takes its name, complete, when the block ends well.

    Raises OSError if the folder can't be written or has no room.
    """
    header = _header(entries)
    places, size = _offsets(entries, 16 + len(header))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "r+b") as file:
            # Takes the room now: a full disk is an error here and not a fault while packing.
            _reserve(file.fileno(), size)
            file.write(_MAGIC + struct.pack("<Q", len(header)) + header)
            file.flush()
            mapped = mmap.mmap(file.fileno(), size)
            data = np.frombuffer(mapped, dtype=np.uint8)
            yield {entry.name: data[at : at + entry.nbytes] for entry, at in zip(entries, places, strict=True)}
            mapped.flush()
            _drop_small_pages(file.fileno(), mapped)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _ask_for_huge_pages(mapped: mmap.mmap) -> None:
    """Weights are read from end to end in each step, and every small page of them would miss the TLB."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without them refuses.
        with suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)


def _drop_small_pages(file: int, mapped: mmap.mmap) -> None:
    """Empties the page cache of what was just written in small pages: readers' faults fill it with huge ones."""
    if hasattr(mmap, "MADV_DONTNEED") and hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            mapped.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _reserve(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)
