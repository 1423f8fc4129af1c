"""Weights from a GGUF file: mapped, dequantised tensor by tensor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tandem.lm.config_gguf import from_gguf
from tandem.lm.weights.source import RawTensor, WeightError, file_digest

_GLOBAL = {"embed": "token_embd", "norm": "output_norm", "head": "output", "rope_freqs": "rope_freqs"}
_LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "post_attn_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "router": "ffn_gate_inp",
}
_EXPERT = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(gate|up|down)\.weight")
_IN_LAYER = re.compile(r"layers\.(\d+)\.(\w+)\.(weight|bias)")
# Architectures whose q and k rows are stored in the order of interleaved RoPE.
_PERMUTED = {"llama", "granite", "smollm3"}


class GgufSource:
    """WeightSource over one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, OSError) as error:
            raise WeightError(f"{path.name}: not a readable GGUF file ({error})") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.stored_bytes = sum(int(tensor.n_bytes) for tensor in self._reader.tensors)
        self._check_extent()
        self.config = from_gguf(self.metadata, self._tensors.__contains__)

    def _check_extent(self) -> None:
        size = self.path.stat().st_size
        for tensor in self._reader.tensors:
            if int(tensor.data_offset) + int(tensor.n_bytes) > size:
                raise WeightError(f"{self.path.name}: tensor {tensor.name} ends beyond the file ({size} bytes)")

    def metadata(self, key: str) -> Any:
        """Value of a metadata key, or None."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def _stored(self, name: str) -> tuple[str, int | None]:
        """Name in the file and, for an expert, its index in the stacked tensor."""
        if match := _EXPERT.fullmatch(name):
            layer, expert, kind = match.groups()
            return f"blk.{layer}.ffn_{kind}_exps.weight", int(expert)
        if match := _IN_LAYER.fullmatch(name):
            layer, kind, part = match.groups()
            return f"blk.{layer}.{_LAYER.get(kind, kind)}.{part}", None
        stem, _, part = name.rpartition(".")
        return f"{_GLOBAL.get(stem, stem)}.{part}", None

    def has(self, name: str) -> bool:
        return self._stored(name)[0] in self._tensors

    def _data(self, name: str) -> tuple[Any, np.ndarray]:
        """The reader's tensor and its data with the outer dimension first, rows in the model's order."""
        stored, expert = self._stored(name)
        tensor = self._tensors.get(stored)
        if tensor is None:
            raise WeightError(f"{self.path.name}: tensor {stored} is missing")
        data = tensor.data if expert is None else tensor.data[expert]
        order = self._row_order(name, len(data))
        return tensor, data if order is None else data[order]

    def _row_order(self, name: str, rows: int) -> np.ndarray | None:
        """Rows of q and k from interleaved to half-split RoPE order; None: as stored."""
        if self.config.architecture not in _PERMUTED:
            return None
        kind = name.split(".")[-2]
        heads = {"q": self.config.num_heads, "k": self.config.num_kv_heads}.get(kind)
        if heads is None:
            return None
        half = rows // heads // 2
        return np.arange(rows).reshape(heads, half, 2).swapaxes(1, 2).reshape(-1)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor, data = self._data(name)
        try:
            values = gguf.quants.dequantize(np.ascontiguousarray(data), tensor.tensor_type)
        except NotImplementedError as error:
            raise WeightError(f"{self.path.name}: {tensor.name} has type {tensor.tensor_type.name}: {error}") from error
        values = np.asarray(values, dtype=np.float32)
        # F32 tensors come as views of the read-only map; the model must own its memory.
        return torch.from_numpy(values if values.flags.writeable and values.base is None else values.copy()).to(dtype)

    def raw(self, name: str) -> RawTensor | None:
        tensor, data = self._data(name)
        cols = int(tensor.shape[0])
        rows = len(data)
        return RawTensor(int(tensor.tensor_type), (rows, cols), data.view(np.uint8).reshape(rows, -1))

    def digest(self) -> str:
        return file_digest([self.path])

    def close(self) -> None:
        self._tensors.clear()
