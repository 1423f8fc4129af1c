"""Weights from a directory of safetensors files, sharded or not; mapped, never unpickled."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from tandem.lm.config_hf import from_hf
from tandem.lm.weights.packed import unpack_awq, unpack_gptq
from tandem.lm.weights.source import RawTensor, WeightError, file_digest

if TYPE_CHECKING:
    from kernels.packing import PackedWeight

_GLOBAL = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
}
_SANDWICH = {
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_EXPERT = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(gate|up|down)\.weight")
_IN_LAYER = re.compile(r"layers\.(\d+)\.(\w+)\.(weight|bias)")
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory, the text part of a multimodal one.

    Raises:
        WeightError: missing or not JSON.
    """
    try:
        return json.loads((path / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise WeightError(f"{path / 'config.json'}: {error}") from error


class TensorFiles:
    """All tensors of a directory's safetensors files by name.

    Each read maps its file anew and lets go of it with the tensor: pages that were read would otherwise stay resident
    beside what the weights were turned into, a second copy of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = sorted(path.glob("*.safetensors"))
        if not self.files:
            raise WeightError(f"{path}: no *.safetensors file (pickled checkpoints are never read)")
        self._where: dict[str, Path] = {}
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as handle:
                    self._where.update(dict.fromkeys(handle.keys(), file))
            except (SafetensorError, OSError) as error:
                raise WeightError(f"{file.name}: not a readable safetensors file ({error})") from error
        self._check_index()
        self.stored_bytes = sum(file.stat().st_size for file in self.files)

    def _check_index(self) -> None:
        index = self.path / "model.safetensors.index.json"
        if not index.is_file():
            return
        named = set(json.loads(index.read_text()).get("weight_map", {}))
        missing = sorted(named - set(self._where))
        if missing:
            raise WeightError(f"{index.name} names {len(missing)} tensors that no file has, such as {missing[0]}")

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        return list(self._where)

    def get(self, name: str) -> torch.Tensor:
        with safe_open(self._file(name), framework="pt") as handle:
            return handle.get_tensor(name)

    def row(self, name: str, index: int) -> torch.Tensor:
        """One entry of the first dimension, read alone."""
        with safe_open(self._file(name), framework="pt") as handle:
            return handle.get_slice(name)[index]

    def _file(self, name: str) -> Path:
        if name not in self._where:
            raise WeightError(f"{self.path.name}: tensor {name} is missing")
        return self._where[name]

    def close(self) -> None:
        self._where.clear()


class SafetensorsSource:
    """WeightSource over a checkpoint directory with Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw_config = read_config(path)
        self.config = from_hf(self._raw_config)
        self._files = TensorFiles(path)
        self.stored_bytes = self._files.stored_bytes
        self._quantization = dict(self.config.quantization or ())
        self._layer_names = dict(_LAYER)
        if self.config.sandwich_norms:
            self._layer_names.update(_SANDWICH)
        if "model.layers.0.block_sparse_moe.gate.weight" in self._files:
            self._layer_names["router"] = "block_sparse_moe.gate"

    def _stored(self, name: str) -> str:
        if match := _EXPERT.fullmatch(name):
            layer, expert, kind = match.groups()
            mixtral = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{_MIXTRAL[kind]}.weight"
            return (
                mixtral if mixtral in self._files else f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"
            )
        if match := _IN_LAYER.fullmatch(name):
            layer, kind, part = match.groups()
            return f"model.layers.{layer}.{self._layer_names.get(kind, kind)}.{part}"
        stem, _, part = name.rpartition(".")
        return f"{_GLOBAL.get(stem, stem)}.{part}"

    def _packed(self, stored: str) -> str | None:
        """Stem of a packed 4-bit matrix, if this is one."""
        stem = stored.removesuffix(".weight")
        return stem if self._quantization and f"{stem}.qweight" in self._files else None

    def has(self, name: str) -> bool:
        stored = self._stored(name)
        return stored in self._files or self._packed(stored) is not None or self._fused(name) is not None

    def _fused(self, name: str) -> tuple[str, int, str] | None:
        """Stacked experts (all of a layer in one tensor): its name, the expert and the part."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        layer, expert, kind = match.groups()
        for block in ("mlp", "block_sparse_moe"):
            stored = f"model.layers.{layer}.{block}.experts.{'down_proj' if kind == 'down' else 'gate_up_proj'}"
            if stored in self._files:
                return stored, int(expert), kind
        return None

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._stored(name)
        if stem := self._packed(stored):
            return self._unpack(stem).to(dtype)
        if stored not in self._files and (fused := self._fused(name)):
            values = self._files.row(fused[0], fused[1])
            half = values.shape[0] // 2
            part = {"gate": values[:half], "up": values[half:], "down": values}[fused[2]]
            return part.to(dtype).clone(memory_format=torch.contiguous_format)
        values = self._files.get(stored)
        return values.to(dtype).contiguous()

    def _unpack(self, stem: str) -> torch.Tensor:
        get = self._files.get
        group = int(self._quantization["group_size"])
        try:
            if self._quantization["method"] == "awq":
                return unpack_awq(get(f"{stem}.qweight"), get(f"{stem}.qzeros"), get(f"{stem}.scales"), group)
            g_idx = get(f"{stem}.g_idx") if f"{stem}.g_idx" in self._files else None
            v2 = self._quantization["checkpoint_format"] == "gptq_v2"
            return unpack_gptq(
                get(f"{stem}.qweight"), get(f"{stem}.qzeros"), get(f"{stem}.scales"), g_idx, group, zero_offset=not v2
            )
        except ValueError as error:
            raise WeightError(f"{stem}: {error}") from error

    def raw(self, name: str) -> RawTensor | None:
        return None

    def packed(self, name: str) -> PackedWeight | None:
        """A four-bit AWQ or GPTQ matrix as the GPU kernels read it.

        None if it is stored otherwise or has odd groups.
        """
        from kernels.packing import PackingError, pack_awq, pack_gptq

        stem = self._packed(self._stored(f"{name}.weight"))
        if stem is None:
            return None
        parts = [self._files.get(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales")]
        group = int(self._quantization["group_size"])
        g_idx = self._files.get(f"{stem}.g_idx") if f"{stem}.g_idx" in self._files else None
        try:
            if self._quantization["method"] == "awq":
                return pack_awq(parts[0], parts[1], parts[2], group if group > 0 else parts[0].shape[0])
            group = group if group > 0 else 8 * parts[0].shape[0]
            v2 = self._quantization["checkpoint_format"] == "gptq_v2"
            return pack_gptq(parts[0], parts[1], parts[2], group, g_idx, v2=v2)
        except PackingError:
            return None

    def digest(self) -> str:
        return file_digest(self._files.files, json.dumps(self._raw_config, sort_keys=True).encode())

    def close(self) -> None:
        self._files.close()
