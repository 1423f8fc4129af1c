"""What a checkpoint offers to a model, and how one is opened."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from tandem.lm.config import ModelConfig

# Files up to this size are hashed whole; of larger ones the ends and evenly spaced samples are.
_HASH_WHOLE = 256 << 20
_SAMPLE = 1 << 20
_SAMPLES = 64


class WeightError(ValueError):
    """A checkpoint that cannot be read: names the file or tensor and what is wrong."""


@dataclass(frozen=True)
class RawTensor:
    """A matrix as the file holds it: ggml type name, [rows, cols] in elements, and uint8 [rows, bytes per row].

    Rows are already in the order of the model (un-permuted). `data` is a view of the mapped file where it can be.
    """

    ggml_type: str
    shape: tuple[int, int]
    data: np.ndarray


class WeightSource(Protocol):
    """Reads tensors one by one; never holds the whole checkpoint."""

    config: ModelConfig
    # Bytes of all tensors as stored.
    stored_bytes: int

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor, stored or derivable."""
        ...

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised tensor, contiguous, in `dtype`. Raises WeightError if it is missing or malformed."""
        ...

    def raw(self, name: str) -> RawTensor | None:
        """The stored matrix for kernels that read quantised blocks; None where the format has no such form."""
        ...

    def digest(self) -> str:
        """Hex digest that tells these weights from others."""
        ...

    def close(self) -> None:
        """Unmaps files."""
        ...


def file_digest(paths: list[Path], extra: bytes = b"") -> str:
    """BLAKE2b-128 over the files in order (large files: size, ends and samples) and `extra`. Hex."""
    state = hashlib.blake2b(extra, digest_size=16)
    for path in paths:
        size = path.stat().st_size
        state.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= _HASH_WHOLE:
                while chunk := file.read(_SAMPLE):
                    state.update(chunk)
                continue
            for index in range(_SAMPLES):
                file.seek((size - _SAMPLE) * index // (_SAMPLES - 1))
                state.update(file.read(_SAMPLE))
    return state.hexdigest()


def open_source(path: Path) -> WeightSource:
    """Opens a .gguf file or a directory with config.json and *.safetensors.

    Raises:
        WeightError: nothing readable there.
        UnsupportedModel: the native family does not know the architecture.
    """
    from tandem.lm.weights.gguf_file import GgufSource
    from tandem.lm.weights.safetensors_dir import SafetensorsSource

    if path.is_file() and path.suffix == ".gguf":
        return GgufSource(path)
    if path.is_dir() and (path / "config.json").is_file():
        return SafetensorsSource(path)
    raise WeightError(f"{path}: neither a .gguf file nor a directory with config.json")
