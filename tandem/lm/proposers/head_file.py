"""The file of a draft head: one safetensors file with a few matrices, a trimmed vocabulary and a card.

Metadata (strings): format, target_digest, hidden, intermediate, vocab, target_vocab, eps, card (JSON), and type.NAME
for each matrix. A matrix is [outputs, inputs] in F32, F16 or BF16, or U8 [outputs, bytes per row] in blocks of 32
weights as GGUF has them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "1"
MATRICES = ("w_in", "w_gate", "w_up", "w_down", "w_out")
GAINS = ("g_s", "g_e", "g_o")
# Bytes per 32 weights of the block forms.
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
_PLAIN = {"F32": 4, "F16": 2, "BF16": 2}
_BLOCK = 32
# A head is small; whatever is larger than this is something else.
_MAX_BYTES = 1 << 30


class HeadError(ValueError):
    """A head file that cannot be used: says what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight [n outputs, k inputs]; data: uint8 [n, bytes per row], as in the file."""

    kind: str
    data: np.ndarray
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dequantize(self) -> np.ndarray:
        """The exact values, fp32 [n, k]."""
        data = np.ascontiguousarray(self.data)
        if self.kind == "F32":
            return data.view("<f4").copy()
        if self.kind == "F16":
            return data.view("<f2").astype(np.float32)
        if self.kind == "BF16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        blocks = data.reshape(self.n, -1, BLOCK_BYTES[self.kind])
        scale = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
        if self.kind == "Q8_0":
            values = blocks[..., 2:].view(np.int8).astype(np.float32) * scale
        else:
            packed = blocks[..., -16:]
            digits = np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.float32)
            if self.kind == "Q4_0":
                values = (digits - 8) * scale
            else:
                values = digits * scale + np.ascontiguousarray(blocks[..., 2:4]).view("<f2").astype(np.float32)
        return values.reshape(self.n, self.k)


def quantize(weight: np.ndarray, kind: str) -> Matrix:
    """An fp32 [n, k] array as a matrix of this form, each block rounded to nearest.

    Raises:
        HeadError: an unknown form, or rows that are no whole blocks.
    """
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    n, k = weight.shape
    if kind in _PLAIN:
        plain = {"F32": lambda: weight, "F16": lambda: weight.astype("<f2"), "BF16": lambda: _bf16(weight)}[kind]()
        return Matrix(kind, plain.view(np.uint8).reshape(n, -1), n, k)
    if kind not in BLOCK_BYTES:
        raise HeadError(f"a matrix is to be {kind!r}, but must be one of {', '.join((*_PLAIN, *BLOCK_BYTES))}")
    if k % _BLOCK:
        raise HeadError(f"rows of {k} inputs are no whole blocks of {_BLOCK}")
    blocks = weight.reshape(n, k // _BLOCK, _BLOCK)
    if kind == "Q8_0":
        scale = (np.abs(blocks).max(axis=-1, keepdims=True) / 127).astype("<f2")
        digits = np.clip(np.rint(_divide(blocks, scale)), -127, 127).astype(np.int8).view(np.uint8)
        parts = [scale.view(np.uint8), digits]
    elif kind == "Q4_0":
        # The value of greatest magnitude becomes -8, which has no positive counterpart.
        at = np.abs(blocks).argmax(axis=-1)[..., None]
        scale = (np.take_along_axis(blocks, at, axis=-1) / -8).astype("<f2")
        digits = np.clip(np.rint(_divide(blocks, scale)) + 8, 0, 15).astype(np.uint8)
        parts = [scale.view(np.uint8), _nibbles(digits)]
    else:
        low, high = blocks.min(axis=-1, keepdims=True), blocks.max(axis=-1, keepdims=True)
        scale, least = ((high - low) / 15).astype("<f2"), low.astype("<f2")
        digits = np.clip(np.rint(_divide(blocks - least.astype(np.float32), scale)), 0, 15).astype(np.uint8)
        parts = [scale.view(np.uint8), least.view(np.uint8), _nibbles(digits)]
    return Matrix(kind, np.concatenate(parts, axis=-1).reshape(n, -1), n, k)


def _bf16(weight: np.ndarray) -> np.ndarray:
    """Rounded to nearest, ties to even."""
    bits = weight.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _divide(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    wide = scale.astype(np.float32)
    return np.divide(values, wide, out=np.zeros_like(values), where=wide != 0)


def _nibbles(digits: np.ndarray) -> np.ndarray:
    """The first half of 32 digits in the low nibbles, the second in the high ones."""
    return digits[..., :16] | digits[..., 16:] << 4


@dataclass(frozen=True, eq=False)
class HeadFile:
    """A recurrent head on the target's final hidden states. Gains fp32 [hidden]; ids int32 [vocab], ascending."""

    target_digest: str
    target_vocab: int
    w_in: Matrix
    w_gate: Matrix
    w_up: Matrix
    w_down: Matrix
    w_out: Matrix
    g_s: np.ndarray
    g_e: np.ndarray
    g_o: np.ndarray
    ids: np.ndarray
    eps: float = 1e-6
    card: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises HeadError if the parts do not fit each other."""
        hidden, inner, vocab = self.hidden, self.intermediate, len(self.ids)
        shapes = {
            "w_in": (hidden, hidden),
            "w_gate": (inner, 2 * hidden),
            "w_up": (inner, 2 * hidden),
            "w_down": (hidden, inner),
            "w_out": (vocab, hidden),
        }
        for name, shape in shapes.items():
            matrix: Matrix = getattr(self, name)
            if (matrix.n, matrix.k) != shape:
                raise HeadError(f"{name} is [{matrix.n}, {matrix.k}], but must be {list(shape)}")
        for name in GAINS:
            gain: np.ndarray = getattr(self, name)
            if gain.dtype != np.float32 or gain.shape != (hidden,) or not np.isfinite(gain).all():
                raise HeadError(f"{name} is {gain.dtype} {list(gain.shape)}, but must be {hidden} finite fp32 numbers")
        if self.ids.dtype != np.int32 or self.ids.ndim != 1 or not vocab:
            raise HeadError(f"ids is {self.ids.dtype} {list(self.ids.shape)}, but must be a list of int32")
        if (np.diff(self.ids) <= 0).any() or self.ids[0] < 0 or self.ids[-1] >= self.target_vocab:
            raise HeadError(f"ids must ascend from 0 or more to less than {self.target_vocab}")
        if hidden % _BLOCK or inner % _BLOCK:
            raise HeadError(f"hidden {hidden} and intermediate {inner} must be multiples of {_BLOCK}")
        if not 0 < self.eps < 1:
            raise HeadError(f"eps is {self.eps}, but must be between 0 and 1")

    @property
    def hidden(self) -> int:
        return self.w_in.n

    @property
    def intermediate(self) -> int:
        return self.w_gate.n

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one drafted token reads."""
        return sum(getattr(self, name).nbytes for name in MATRICES[1:])


def save_head(path: Path, head: HeadFile) -> None:
    """Writes the file; it appears whole or not at all."""
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    metadata = {
        "format": FORMAT,
        "target_digest": head.target_digest,
        "hidden": str(head.hidden),
        "intermediate": str(head.intermediate),
        "vocab": str(len(head.ids)),
        "target_vocab": str(head.target_vocab),
        "eps": repr(head.eps),
        "card": json.dumps(head.card, sort_keys=True),
    }
    for name in MATRICES:
        matrix: Matrix = getattr(head, name)
        metadata[f"type.{name}"] = matrix.kind
        plain = matrix.kind in _PLAIN
        shape = [matrix.n, matrix.k] if plain else list(matrix.data.shape)
        dtype = matrix.kind if plain else "U8"
        tensors[name] = (dtype, shape, matrix.data.tobytes())
    for name in (*GAINS, "ids"):
        array: np.ndarray = getattr(head, name)
        tensors[name] = ("I32" if name == "ids" else "F32", list(array.shape), array.tobytes())
    # The format is a length, a JSON header and the bytes; the library's own writer changed its interface.
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    part.write_bytes(b"".join((len(text).to_bytes(8, "little"), text, *(data for _, _, data in tensors.values()))))
    part.replace(path)


def load_head(path: Path) -> HeadFile:
    """Reads a head.

    Raises:
        HeadError: the file cannot be read or contradicts itself.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise HeadError(f"{path} has {size} bytes, but a head has at most {_MAX_BYTES}")
        raw = path.read_bytes()
    except OSError as error:
        raise HeadError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return _parse(raw)
    except HeadError as error:
        raise HeadError(f"{path}: {error}") from error


def _parse(raw: bytes) -> HeadFile:
    from safetensors import SafetensorError, deserialize

    try:
        tensors: dict[str, dict[str, Any]] = dict(deserialize(raw))
        length = int.from_bytes(raw[:8], "little")
        metadata: dict[str, str] = json.loads(raw[8 : 8 + length]).get("__metadata__", {})
    except (SafetensorError, ValueError) as error:
        raise HeadError(f"no safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise HeadError(f"format is {metadata.get('format')!r}, but this version reads {FORMAT!r}")
    missing = [name for name in (*MATRICES, *GAINS, "ids") if name not in tensors]
    if missing:
        raise HeadError(f"tensors {', '.join(missing)} are missing")
    parts: dict[str, Any] = {name: _matrix(name, metadata.get(f"type.{name}", ""), tensors[name]) for name in MATRICES}
    for name, dtype in (*((name, "F32") for name in GAINS), ("ids", "I32")):
        found = tensors[name]
        if found["dtype"] != dtype or len(found["shape"]) != 1:
            raise HeadError(f"{name} is {found['dtype']} {found['shape']}, but must be a list of {dtype}")
        parts[name] = np.frombuffer(found["data"], "<i4" if dtype == "I32" else "<f4").copy()
    try:
        head = HeadFile(
            target_digest=metadata["target_digest"],
            target_vocab=int(metadata["target_vocab"]),
            eps=float(metadata["eps"]),
            card=dict(json.loads(metadata.get("card") or "{}")),
            **parts,
        )
        told = tuple(int(metadata[name]) for name in ("hidden", "intermediate", "vocab"))
    except HeadError:
        raise
    except KeyError as error:
        raise HeadError(f"metadata {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise HeadError(f"metadata cannot be read: {error}") from error
    if told != (head.hidden, head.intermediate, len(head.ids)):
        held = (head.hidden, head.intermediate, len(head.ids))
        raise HeadError(f"metadata says hidden, intermediate, vocab {told}, but the tensors are {held}")
    return head


def _matrix(name: str, kind: str, found: dict[str, Any]) -> Matrix:
    """Raises HeadError on a form that is not known or sizes that do not fit it."""
    shape, data = tuple(found["shape"]), np.frombuffer(found["data"], np.uint8)
    if kind not in _PLAIN and kind not in BLOCK_BYTES:
        raise HeadError(f"type.{name} is {kind!r}, but must be one of {', '.join((*_PLAIN, *BLOCK_BYTES))}")
    dtype = kind if kind in _PLAIN else "U8"
    if found["dtype"] != dtype or len(shape) != 2 or not all(shape):
        raise HeadError(f"{name} is {found['dtype']} {list(shape)}, but {kind} needs a matrix of {dtype}")
    n, width = shape
    if kind in _PLAIN:
        return Matrix(kind, data.reshape(n, width * _PLAIN[kind]).copy(), n, width)
    if width % BLOCK_BYTES[kind]:
        raise HeadError(f"{name} has rows of {width} bytes, but {kind} has blocks of {BLOCK_BYTES[kind]}")
    return Matrix(kind, data.reshape(n, width).copy(), n, width // BLOCK_BYTES[kind] * _BLOCK)
