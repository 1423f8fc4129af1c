"""What a GGUF file says of itself (metadata and where each tensor lies), cached because parsing takes seconds.

Parsing is the gguf library's. Its reader visits every token of the vocabulary one by one, so the result is kept in the
cache folder, keyed by the file's path, size and modification time.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.paths import cache_dir, file_key, write_atomically

_VERSION = 1


class GgufError(ValueError):
    """The file is not a GGUF file that can be read: names the file and the reason."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ggml type name ("Q4_1"), shape as in numpy (slowest first), byte offset and length in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufIndex:
    """Metadata by key, vocabulary included, and tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def _parse(path: Path) -> GgufIndex:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise GgufError(f"{path} cannot be read as GGUF: {error}") from error
    metadata = {
        key: field.contents()
        for key, field in reader.fields.items()
        # Keys of the container itself, such as GGUF.version, repeat what the layout already says.
        if not key.startswith("GGUF.")
    }
    size = path.stat().st_size
    tensors = {}
    for tensor in reader.tensors:
        shape = tuple(int(dim) for dim in reversed(tensor.shape))
        entry = GgufTensor(tensor.name, tensor.tensor_type.name, shape, int(tensor.data_offset), int(tensor.n_bytes))
        if entry.offset + entry.nbytes > size:
            raise GgufError(f"{path} is cut off: tensor {entry.name} ends at {entry.offset + entry.nbytes} of {size}")
        tensors[entry.name] = entry
    return GgufIndex(path, metadata, tensors)


def load_index(path: Path) -> GgufIndex:
    """Reads the index of a GGUF file, from the cache if the file has not changed since.

    Raises:
        GgufError: not a GGUF file, or cut off.
    """
    cached = cache_dir() / "gguf" / f"{file_key(path)}-v{_VERSION}.json"
    try:
        data = json.loads(cached.read_bytes())
        tensors = {t[0]: GgufTensor(t[0], t[1], tuple(t[2]), t[3], t[4]) for t in data["tensors"]}
        return GgufIndex(path, data["metadata"], tensors)
    except (OSError, ValueError, KeyError, IndexError):
        pass
    index = _parse(path)
    rows = [[t.name, t.type, t.shape, t.offset, t.nbytes] for t in index.tensors.values()]
    try:
        write_atomically(cached, json.dumps({"metadata": index.metadata, "tensors": rows}).encode())
    except OSError:
        # A cache that cannot be written costs time at the next start, nothing else.
        cached.unlink(missing_ok=True)
    return index
