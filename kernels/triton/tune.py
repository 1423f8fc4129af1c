"""Looks for better tiles on the GPU at hand and keeps them in this machine's cache, from where they can be shipped.

Only the deterministic variants and the small-M ones are tuned: they are what decoding waits for. A new tile may change
bits, so tuning belongs before serving, not into it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from kernels.triton import checks, linear, quant_linear
from kernels.triton.attention import paged_attention
from kernels.triton.configs import Tile, current_target, save_tiles, tile

Measure = Callable[[Callable[[], object]], float]
Run = Callable[[Tile], object]


def _tiles(block_ms: tuple[int, ...], block_ns: tuple[int, ...], block_ks: tuple[int, ...] = (64,)) -> list[Tile]:
    grid = product(block_ms, block_ns, block_ks, (4, 8), (2, 3, 4))
    return [Tile(m, n, k, warps, stages) for m, n, k, warps, stages in grid]


def _jobs(device: torch.device, small: bool) -> dict[str, tuple[Run, list[Tile]]]:
    """Key of the table → (what to time with a tile, tiles to try)."""
    jobs: dict[str, tuple[Run, list[Tile]]] = {}
    size = 64 if small else 4096
    dtype = torch.bfloat16

    def attention(case: checks.Paged, chosen: Tile) -> object:
        options: dict[str, Any] = {"split_size": 128} if small else {}
        return paged_attention(case.q, case.k, case.v, case.batch, scale=0.1, config=chosen, **options)

    for head_dim in (64,) if small else (64, 128, 256):
        heads = (2, 1) if small else (32, 8)
        case = checks.paged_inputs(
            [size] * (1 if small else 16), [1] * (1 if small else 16), heads, head_dim, dtype, device
        )
        jobs[f"attention/deterministic-{head_dim}"] = (partial(attention, case), _tiles((16, 32, 64), (32, 64, 128)))
    x = torch.randn(8, size, device=device).to(dtype)
    weight = torch.randn(size, size, device=device).to(dtype)
    jobs["linear/bf16"] = (
        lambda chosen: linear.linear(x, weight, config=chosen),
        _tiles((16, 32, 64), (64, 128), (64, 128)),
    )
    packed = checks.packed_inputs(size, size, 4, 32, device)
    for kind in ("deterministic", "small"):
        jobs[f"quant_linear/{kind}"] = (
            lambda chosen: quant_linear.quant_linear(x, packed, config=chosen),
            _tiles((16, 32) if kind == "deterministic" else (16,), (64, 128, 256)),
        )
    return jobs


def tune(device: torch.device, measure: Measure, *, small: bool = False) -> dict[str, Any]:
    """Times candidates and saves those that beat the tile in use by 3%. small: one candidate each, nothing saved.

    Returns per key the milliseconds before and after and the tile chosen. Tiles that do not compile or do not fit the
    card are passed over.
    """
    target, found, better = current_target(), {}, {}
    for key, (run, candidates) in _jobs(device, small).items():
        kernel, _, variant = key.partition("/")
        current = tile(target, kernel, variant)
        before = best = measure(partial(run, current))
        chosen = current
        for candidate in candidates[:1] if small else candidates:
            try:
                milliseconds = measure(partial(run, candidate))
            except Exception:
                continue
            if milliseconds < best:
                best, chosen = milliseconds, candidate
        if best < 0.97 * before:
            better[key] = chosen
        found[key] = {"before_ms": before, "after_ms": best, "tile": str(chosen)}
    if better and not small:
        save_tiles(target, better)
    return found
