"""KV tensors of all layers."""

from __future__ import annotations

import torch


class KVCache:
    """K and V per layer, each [num_blocks, num_kv_heads, block_size, head_dim]; reserved, untouched until used."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

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

    @staticmethod
    def block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * num_layers * num_kv_heads * block_size * head_dim * dtype.itemsize
