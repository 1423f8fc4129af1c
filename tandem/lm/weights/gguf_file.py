"""Weights from a GGUF file: mapped, dequantised tensor by tensor."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

from tandem.lm.config_gguf import from_gguf
from tandem.lm.weights.source import RawTensor, WeightError, file_digest
from tandem.models.gguf_index import GgufError, GgufTensor, load_index

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
    """WeightSource over one GGUF file.

    Each read maps its tensor anew and lets go of it with the array: pages that were read would otherwise stay resident
    beside what the weights were turned into, a second copy of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            index = load_index(path)
        except GgufError as error:
            raise WeightError(str(error)) from error
        self._tensors = index.tensors
        self.stored_bytes = sum(tensor.nbytes for tensor in index.tensors.values())
        self.config = from_gguf(index.metadata.get, self._tensors.__contains__)

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

    def _data(self, name: str) -> tuple[GgufTensor, np.ndarray]:
        """The tensor's entry and its bytes, uint8 [rows, bytes per row], rows in the model's order.

        A vector has one row per element.
        """
        stored, expert = self._stored(name)
        entry = self._tensors.get(stored)
        if entry is None:
            raise WeightError(f"{self.path.name}: tensor {stored} is missing")
        data = np.memmap(self.path, np.uint8, "r", entry.offset, (entry.nbytes,)).view(np.ndarray)
        if expert is not None:
            size = entry.nbytes // entry.shape[0]
            data = data[expert * size : (expert + 1) * size]
        rows = entry.shape[0] if len(entry.shape) == 1 else entry.shape[-2]
        data = data.reshape(rows, -1)
        order = self._row_order(name, rows)
        return entry, data if order is None else data[order]

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
        entry, data = self._data(name)
        shape = entry.shape[-2:]
        if entry.type == "F32":
            values = data.copy().view(np.float32)
        else:
            import gguf

            try:
                values = gguf.quants.dequantize(np.ascontiguousarray(data), gguf.GGMLQuantizationType[entry.type])
            except (NotImplementedError, KeyError) as error:
                raise WeightError(f"{self.path.name}: {entry.name} has type {entry.type}: {error}") from error
        return torch.from_numpy(np.asarray(values, dtype=np.float32).reshape(shape)).to(dtype)

    def raw(self, name: str) -> RawTensor | None:
        entry, data = self._data(name)
        return RawTensor(entry.type, (len(data), entry.shape[-1]), data)

    def digest(self) -> str:
        return file_digest([self.path])

    def close(self) -> None:
        """Nothing stays mapped between two reads."""
