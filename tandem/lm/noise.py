"""Position-keyed Gumbel noise: the reference for every path.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with key = the 64-bit seed and
counter = (output position, token id, choice index, purpose). The first output word gives u = (bits >> 9 + 0.5) · 2^-23,
which is exact in fp32 and never 0 or 1, and the noise is -log(-log(u)), computed in fp64 and rounded to fp32.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

# Largest value of gumbel(): u is at most 1 - 2^-24.
GUMBEL_MAX = float(-np.log(-np.log1p(-(2.0**-24))))


class Purpose(IntEnum):
    """Last word of the counter: streams that never meet."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


Words = npt.NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds of Philox4x32 over arrays that broadcast; every word is a uint64 holding 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(_ROUNDS):
        if round_:
            k0, k1 = (k0 + np.uint64(_W0)) & _MASK, (k1 + np.uint64(_W1)) & _MASK
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _MASK, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _MASK
    return c0, c1, c2, c3


def words(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, ids: npt.ArrayLike, choices: npt.ArrayLike, purpose: Purpose
) -> npt.NDArray[np.uint32]:
    """First Philox word for each (seed, position, token id, choice); arguments broadcast. uint32, broadcast shape."""
    seed = np.asarray(seeds, dtype=np.uint64)
    as_word = [np.asarray(value, dtype=np.uint64) for value in (positions, ids, choices)]
    # A zero of the full shape makes every word of the counter an array of that shape.
    zero = np.zeros(np.broadcast_shapes(seed.shape, *(word.shape for word in as_word)), dtype=np.uint64)
    counter = (zero + as_word[0], zero + as_word[1], zero + as_word[2], zero + np.uint64(purpose))
    return philox4x32(counter, (seed & _MASK, seed >> _SHIFT))[0].astype(np.uint32)


def uniforms(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.float32]:
    """Uniforms in (0, 1) from 32-bit words: (bits >> 9 + 0.5) · 2^-23, exact in fp32."""
    return ((bits >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def uniform(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, ids: npt.ArrayLike, choices: npt.ArrayLike, purpose: Purpose
) -> npt.NDArray[np.float32]:
    """Position-keyed uniforms in (0, 1), fp32."""
    return uniforms(words(seeds, positions, ids, choices, purpose))


def gumbel(
    seeds: npt.ArrayLike,
    positions: npt.ArrayLike,
    ids: npt.ArrayLike,
    choices: npt.ArrayLike,
    purpose: Purpose = Purpose.SAMPLE,
) -> npt.NDArray[np.float32]:
    """Position-keyed standard Gumbel noise, fp32: computed in fp64 from the fp32 uniform, then rounded."""
    u = uniform(seeds, positions, ids, choices, purpose).astype(np.float64)
    return (-np.log(-np.log(u))).astype(np.float32)
