"""Rotary position embedding (Su et al. 2021), half-split (NeoX) style, from a table that grows by fixed pages."""

from __future__ import annotations

import math

import torch

from tandem.lm.config import RopeConfig
from tandem.lm.config_hf import yarn_mscale

# Positions per page: each page is computed with one shape, so its bits do not depend on what was asked first.
_PAGE = 1024


def inverse_frequencies(config: RopeConfig, dim: int) -> tuple[torch.Tensor, float]:
    """Frequencies fp32 [dim / 2] and the factor on cos and sin."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    base = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return base / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(base, config), 1.0
    if config.kind == "yarn":
        attention = config.attention_factor
        return _yarn(base, config, dim), yarn_mscale(config.factor) if attention is None else attention
    return base, 1.0


def _llama3(base: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth step between."""
    wavelength = 2 * math.pi / base
    smooth = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * base / config.factor + smooth * base


def _yarn(base: torch.Tensor, config: RopeConfig, dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023, eq. 17 to 23): a ramp over dimensions between interpolated and original."""

    def dimension(rotations: float) -> float:
        return dim * math.log(config.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / config.factor * ramp + base * (1 - ramp)


class RotaryTable:
    """cos and sin by position, fp32 [positions, rotary_dim / 2], grown on demand.

    `divisors` (fp32 [rotary_dim / 2], GGUF's rope_freqs) divides the frequencies; it replaces config's own scaling.
    """

    def __init__(
        self, config: RopeConfig, dim: int, device: torch.device, divisors: torch.Tensor | None = None
    ) -> None:
        frequencies, self._factor = inverse_frequencies(config, dim)
        self._frequencies = frequencies if divisors is None else frequencies / divisors.float()
        self._device = device
        empty = torch.empty(0, dim // 2, device=device)
        self._cos, self._sin = empty, empty

    def _grow(self, positions: int) -> None:
        pages_cos, pages_sin = [self._cos], [self._sin]
        for start in range(self._cos.shape[0], positions, _PAGE):
            angles = torch.arange(start, start + _PAGE).float()[:, None] * self._frequencies
            pages_cos.append((angles.cos() * self._factor).to(self._device))
            pages_sin.append((angles.sin() * self._factor).to(self._device))
        self._cos, self._sin = torch.cat(pages_cos), torch.cat(pages_sin)

    def table(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions 0 to positions - 1, fp32 [positions, rotary_dim / 2]."""
        if positions > self._cos.shape[0]:
            self._grow(positions)
        return self._cos[:positions], self._sin[:positions]

    def at(self, positions: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [rows, 1, rotary_dim / 2] for int64 positions, of which `largest` is the greatest."""
        if largest >= self._cos.shape[0]:
            self._grow(largest + 1)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first 2 · cos.shape[-1] elements of x [rows, heads, head_dim]; fp32 inside, x's dtype out."""
    half = cos.shape[-1]
    wide = x.float()
    first, second = wide[..., :half], wide[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(wide[..., 2 * half :])
    return torch.cat(parts, dim=-1).to(x.dtype)
