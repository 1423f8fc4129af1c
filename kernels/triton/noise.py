"""Position-keyed noise on the device: Philox4x32-10 (Salmon et al., SC 2011), bit-equal in words and uniforms to
tandem.lm.noise.

Key = the 64-bit seed, counter = (output position, token id, choice, purpose); the first output word gives
u = (word >> 9 + 0.5) · 2⁻²³ and the noise −log(−log u), in fp64 rounded to fp32: an fp32 logarithm by hardware has no
correct digit for u next to 1, which is where the winners of a Gumbel race come from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.interpreter import correct_interpreter

correct_interpreter()


@triton.jit
def philox_word(seed, position, token, choice, purpose):
    """First output word of Philox4x32-10. seed: int64; the rest integers below 2³². `token` gives the shape."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c1 = token.to(tl.uint32)
    zero = c1 ^ c1
    c0 = zero + position.to(tl.uint32)
    c2 = zero + choice.to(tl.uint32)
    c3 = (zero + purpose).to(tl.uint32)
    m0 = zero + 0xD2511F53
    m1 = zero + 0xCD9E8D57
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0


@triton.jit
def uniform_of_word(word):
    """(word >> 9 + 0.5) · 2⁻²³, exact in fp32, never 0 or 1."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def gumbel_noise(seed, position, token, choice, purpose):
    """Standard Gumbel noise, fp32."""
    u = uniform_of_word(philox_word(seed, position, token, choice, purpose))
    return (-tl.log(-tl.log(u.to(tl.float64)))).to(tl.float32)


@triton.jit
def noise_kernel(words, uniforms, gumbels, seeds, positions, tokens, choices, purposes, count, BLOCK: tl.constexpr):
    """Words, uniforms and noise for `count` counters. Grid: (count / BLOCK,)."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    seed = tl.load(seeds + index, mask=inside, other=0)
    position = tl.load(positions + index, mask=inside, other=0)
    token = tl.load(tokens + index, mask=inside, other=0)
    choice = tl.load(choices + index, mask=inside, other=0)
    purpose = tl.load(purposes + index, mask=inside, other=0)
    word = philox_word(seed, position, token, choice, purpose)
    tl.store(words + index, word.to(tl.int32, bitcast=True), mask=inside)
    tl.store(uniforms + index, uniform_of_word(word), mask=inside)
    tl.store(gumbels + index, gumbel_noise(seed, position, token, choice, purpose), mask=inside)


def noise(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    choices: torch.Tensor,
    purposes: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox words (int32 bits), uniforms and Gumbel noise (fp32) for vectors of counters.

    Seeds are int64, the rest int32.
    """
    count = seeds.numel()
    words = torch.empty(count, dtype=torch.int32, device=seeds.device)
    uniforms = torch.empty(count, dtype=torch.float32, device=seeds.device)
    gumbels = torch.empty_like(uniforms)
    if count:
        noise_kernel[(triton.cdiv(count, 256),)](
            words, uniforms, gumbels, seeds, positions, tokens, choices, purposes, count, BLOCK=256
        )
    return words, uniforms, gumbels
