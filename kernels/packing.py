"""One layout for group-quantised weights of every origin, so that one kernel serves AWQ, GPTQ and GGUF blocks.

A weight [N, K] is held as codes along K with N contiguous. Four-bit codes are packed by tiles of 64 rows of K: byte
row j of a tile carries row j in its low and row j + 32 in its high nibble, so that unpacking moves nothing between
lanes. Each group of K (a multiple of 32) has a scale and perhaps a zero point or a minimum: w = (code − zero) · scale
+ minimum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

TILE_K = 64
HALF_K = 32
# Where AWQ puts output i of eight inside a 32-bit word, in nibbles.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
GGUF_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


class PackingError(ValueError):
    """A quantised tensor has a shape or a parameter that its format does not allow."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A group-quantised weight [N, K], K padded to a multiple of 64 with codes that multiply nothing.

    codes: uint8 [Kp / 2, N] (bits = 4) or int8 [Kp, N] (bits = 8); scales, zeros, minimums: fp16 or fp32 [groups, N];
    permutation: int32 [Kp] or None: packed row i multiplies input permutation[i] (GPTQ act-order).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    minimums: torch.Tensor | None
    permutation: torch.Tensor | None
    bits: int
    group_size: int
    out_features: int
    in_features: int

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device."""

        def move(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        return PackedWeight(
            self.codes.to(device),
            self.scales.to(device),
            move(self.zeros),
            move(self.minimums),
            move(self.permutation),
            self.bits,
            self.group_size,
            self.out_features,
            self.in_features,
        )

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over the weight reads."""
        parts = (self.codes, self.scales, self.zeros, self.minimums, self.permutation)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def pack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    bits: int,
    zeros: torch.Tensor | None = None,
    minimums: torch.Tensor | None = None,
    permutation: torch.Tensor | None = None,
) -> PackedWeight:
    """Packs codes [K, N] (0 … 15, or int8) with scales, zeros, minimums [K / group_size, N].

    Raises PackingError when group_size is no multiple of 32 or does not divide K.
    """
    k, n = codes.shape
    if group_size % HALF_K or k % group_size or scales.shape != (k // group_size, n):
        raise PackingError(f"group size {group_size}, codes {tuple(codes.shape)}, scales {tuple(scales.shape)}")
    padding = -k % TILE_K
    if padding:
        # Rows behind K meet inputs that are read as 0, whatever their scale; the scale row must only exist.
        codes = torch.cat([codes, codes.new_zeros(padding, n)])
        extra = -(-(k + padding) // group_size) - scales.shape[0]
        if extra:
            scales = torch.cat([scales, scales.new_zeros(extra, n)])
            zeros = None if zeros is None else torch.cat([zeros, zeros.new_zeros(extra, n)])
            minimums = None if minimums is None else torch.cat([minimums, minimums.new_zeros(extra, n)])
    if bits == 4:
        tiles = codes.to(torch.uint8).view(-1, 2, HALF_K, n)
        packed = (tiles[:, 0] | (tiles[:, 1] << 4)).reshape(-1, n).contiguous()
    else:
        packed = codes.to(torch.int8).contiguous()
    return PackedWeight(
        packed,
        scales.contiguous(),
        None if zeros is None else zeros.to(scales.dtype).contiguous(),
        None if minimums is None else minimums.contiguous(),
        permutation,
        bits,
        group_size,
        n,
        k,
    )


def unpack_nibbles(words: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """int32 [R, C] → uint8 [R, C, 8]: nibble order[i] of each word at place i."""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 0xF).to(torch.uint8)


def pack_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> PackedWeight:
    """AWQ (arXiv 2306.00978) GEMM layout: qweight int32 [K, N / 8], qzeros int32 [K / g, N / 8], scales fp16 [K / g,
    N].

    w = (code − zero) · scale. The nibbles of a word hold outputs 0 2 4 6 1 3 5 7.
    """
    codes = unpack_nibbles(qweight, AWQ_ORDER).flatten(1)
    zeros = unpack_nibbles(qzeros, AWQ_ORDER).flatten(1)
    return pack(codes, scales, group_size, 4, zeros=zeros)


def pack_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    g_idx: torch.Tensor | None = None,
    *,
    v2: bool = False,
) -> PackedWeight:
    """GPTQ (arXiv 2210.17323), 4 bits: qweight int32 [K / 8, N] along K, qzeros int32 [K / g, N / 8], scales [K / g,
    N].

    Version 1 stores zero − 1. g_idx int32 [K] names the group of each input (act-order): inputs are then sorted by
    group. Raises PackingError when g_idx does not give every group group_size inputs.
    """
    codes = unpack_nibbles(qweight).permute(0, 2, 1).flatten(0, 1)
    zeros = unpack_nibbles(qzeros).flatten(1).to(torch.int32)
    if not v2:
        zeros = zeros + 1
    permutation = None
    if g_idx is not None:
        counts = torch.bincount(g_idx.long(), minlength=scales.shape[0])
        if not bool((counts == group_size).all()):
            raise PackingError(f"g_idx gives groups of {sorted(set(counts.tolist()))} inputs, wanted {group_size}")
        order = torch.argsort(g_idx.long(), stable=True)
        if not torch.equal(order, torch.arange(order.numel(), device=order.device)):
            codes = codes[order]
            permutation = torch.nn.functional.pad(order, (0, -order.numel() % TILE_K)).to(torch.int32)
    return pack(codes, scales, group_size, 4, zeros=zeros, permutation=permutation)


def pack_gguf(blocks: torch.Tensor | np.ndarray, kind: str, in_features: int) -> PackedWeight:
    """GGUF blocks of 32 along K, uint8 [N, K / 32 · block bytes]; kind is Q4_0, Q4_1 or Q8_0.

    Q4_0: fp16 d, 16 bytes; w = (code − 8) · d. Q4_1: fp16 d, fp16 m, 16 bytes; w = code · d + m. Q8_0: fp16 d, 32 int8.
    Byte j of a four-bit block holds inputs j (low) and j + 16 (high). Raises PackingError for another kind or shape.
    """
    if kind not in GGUF_BLOCK_BYTES:
        raise PackingError(f"kind {kind!r} is not one of {', '.join(GGUF_BLOCK_BYTES)}")
    raw = torch.as_tensor(blocks)
    size = GGUF_BLOCK_BYTES[kind]
    if in_features % 32 or raw.dtype != torch.uint8 or raw.shape[1] != in_features // 32 * size:
        raise PackingError(f"blocks {tuple(raw.shape)} {raw.dtype} are not {kind} with K = {in_features}")
    n = raw.shape[0]
    parts = raw.reshape(n, -1, size)
    scales = parts[..., :2].contiguous().view(torch.float16)[..., 0].T.contiguous()
    if kind == "Q8_0":
        codes = parts[..., 2:].contiguous().view(torch.int8).reshape(n, in_features).T
        return pack(codes, scales, 32, 8)
    body = parts[..., -16:]
    codes = torch.cat([body & 0xF, body >> 4], dim=-1).reshape(n, in_features).T
    if kind == "Q4_0":
        return pack(codes, scales, 32, 4, zeros=torch.full_like(scales, 8.0))
    minimums = parts[..., 2:4].contiguous().view(torch.float16)[..., 0].T.contiguous()
    return pack(codes, scales, 32, 4, minimums=minimums)


def concatenate(parts: list[PackedWeight]) -> PackedWeight | None:
    """Weights with one input stacked along N; None when their forms differ or they order their inputs differently."""
    first = parts[0]
    forms = {
        (part.bits, part.group_size, part.in_features, part.scales.dtype, part.zeros is None, part.minimums is None)
        for part in parts
    }
    if len(forms) > 1 or any(part.permutation is not None for part in parts):
        return None

    def stack(name: str) -> torch.Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors, dim=1).contiguous()

    codes, scales = stack("codes"), stack("scales")
    if codes is None or scales is None:
        return None
    return PackedWeight(
        codes,
        scales,
        stack("zeros"),
        stack("minimums"),
        None,
        first.bits,
        first.group_size,
        sum(part.out_features for part in parts),
        first.in_features,
    )
