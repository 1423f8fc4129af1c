"""KV tensors of all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVShape:
    """KV of one layer: heads, and the sizes of a key and of a value."""

    num_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """K and V per layer, each [num_blocks, num_heads, block_size, dim]; reserved, untouched until used."""

    def __init__(
        self, layers: list[KVShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self.keys = [
            torch.empty((num_blocks, layer.num_heads, block_size, layer.key_dim), dtype=dtype, device=device)
            for layer in layers
        ]
        self.values = [
            torch.empty((num_blocks, layer.num_heads, block_size, layer.value_dim), dtype=dtype, device=device)
            for layer in layers
        ]

    def write(
        self, layer: int, blocks: torch.Tensor, offsets: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Stores key and value [rows, num_kv_heads, head_dim] at (block, offset) of each row, rounded to dtype."""
        self.keys[layer][blocks, :, offsets] = key.to(self.dtype)
        self.values[layer][blocks, :, offsets] = value.to(self.dtype)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, source to destination, in every layer."""
        if not pairs:
            return
        source = torch.tensor([pair[0] for pair in pairs], device=self.keys[0].device)
        target = torch.tensor([pair[1] for pair in pairs], device=self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]


def torch_dtype(name: str) -> torch.dtype:
    """Raises ValueError for a KV dtype that only other kernels know."""
    found = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
    if found is None:
        raise ValueError(f"kv_dtype is {name!r}, but the torch path knows float32, bfloat16 and float16")
    return found


def block_bytes(layers: list[KVShape], block_size: int, kv_dtype: str) -> int:
    """Bytes of one block over all layers, K and V. Raises ValueError for an unknown dtype."""
    width = torch_dtype(kv_dtype).itemsize
    return sum(layer.num_heads * block_size * (layer.key_dim + layer.value_dim) * width for layer in layers)
