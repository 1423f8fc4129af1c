"""The calls that are compiled ahead of time: every operation with the options that change its code."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.packing import PackedWeight
from kernels.triton import kv_write, linear, noise, norm, quant_linear, sampling, verify
from kernels.triton.attention import AttentionBatch, paged_attention
from kernels.triton.targets import TARGETS, Target

Case = Callable[[Target], None]
VOCAB = 128256
ROWS = 64


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _int(*shape: int) -> torch.Tensor:
    return _meta(*shape, dtype=torch.int32)


def _float(*shape: int) -> torch.Tensor:
    return _meta(*shape, dtype=torch.float32)


def _fp8(target: Target) -> torch.dtype:
    return getattr(torch, target.torch_fp8)


def attention(
    target: Target,
    *,
    head_dim: int,
    mode: str,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    fp8: bool = False,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    heads: tuple[int, int] = (32, 8),
) -> None:
    """One attention launch; mode is prefill, decode (parallel splits) or deterministic (splits in order)."""
    q_heads, kv_heads = heads
    query = 1 if mode == "decode" else 512
    shape = (4096, kv_heads, block_size, head_dim)
    cache = _meta(*shape, dtype=_fp8(target) if fp8 else dtype)
    scales = _float(*shape[:3]) if fp8 else None
    paged_attention(
        _meta(4 * query, q_heads, head_dim, dtype=dtype),
        cache,
        torch.empty_like(cache),
        AttentionBatch(_int(5), _int(4), _int(4, 512), query, 8192),
        scale=head_dim**-0.5,
        window=4096 if window else None,
        softcap=30.0 if softcap else 0.0,
        sinks=_meta(q_heads) if sinks else None,
        k_scale=scales,
        v_scale=scales,
        deterministic=mode == "deterministic",
        parallel_splits=mode == "decode",
    )


def single(target: Target) -> None:
    """One sequence with one row and one split: integers of 1 become constants, which is other code."""
    cache = _meta(4096, 8, 16, 128)
    batch = AttentionBatch(_int(2), _int(1), _int(1, 64), 1, 1000)
    variants: list[dict[str, Any]] = [{"parallel_splits": False}, {"parallel_splits": True}, {"deterministic": False}]
    for options in variants:
        paged_attention(_meta(1, 32, 128), cache, torch.empty_like(cache), batch, scale=0.1, window=1, **options)
    linear.linear(_meta(1, 4096), _meta(4096, 4096))
    quant_linear.quant_linear(_meta(1, 4096), packed("awq", 4096, 4096))
    sampling.sample(_float(1, 1000), _params(1))
    sampling.edit_logits(
        _float(1, 1000),
        sampling.LogitEdits(_int(2), _int(1), _float(1), _int(1), _float(1), _float(1), _float(1)),
    )


def rope_write(target: Target, *, fp8: bool, interleaved: bool, head_dim: int = 128, rotary_dim: int = 128) -> None:
    cache = _meta(4096, 8, 16, head_dim, dtype=_fp8(target) if fp8 else torch.bfloat16)
    scales = _float(4096, 8, 16) if fp8 else None
    kv_write.rope_write_kv(
        _meta(ROWS, 32, head_dim),
        _meta(ROWS, 8, head_dim),
        _meta(ROWS, 8, head_dim),
        _float(8192, rotary_dim),
        _int(ROWS),
        _meta(ROWS, dtype=torch.int64),
        cache,
        torch.empty_like(cache),
        interleaved=interleaved,
        k_scale=scales,
        v_scale=scales,
    )


def norms(target: Target, *, width: int = 4096) -> None:
    norm.rms_norm(_meta(ROWS, width), _float(width), 1e-5)
    norm.rms_norm(_meta(ROWS, width), _float(width), 1e-5, _meta(ROWS, width))


def activations(target: Target) -> None:
    for activation in norm.ACTIVATIONS:
        norm.activation_and_mul(_meta(ROWS, 2 * 14336), activation)


def _params(rows: int) -> sampling.RowParams:
    return sampling.RowParams(
        _float(rows),
        _float(rows),
        _int(rows),
        _float(rows),
        _meta(rows, dtype=torch.int64),
        _int(rows),
        _int(rows),
        _int(rows),
    )


def sample(target: Target) -> None:
    logits = _float(ROWS, VOCAB)
    edits = sampling.LogitEdits(
        _int(ROWS + 1), _int(999), _float(999), _int(999), _float(ROWS), _float(ROWS), _float(ROWS)
    )
    sampling.edit_logits(logits, edits)
    sampling.mask_logits(logits, _int(4, VOCAB // 32), _int(ROWS))
    sampling.sample(logits, _params(ROWS))
    sampling.token_scores(logits, _int(ROWS))


def verification(target: Target) -> None:
    verify.keep_while_equal(_int(ROWS), _int(ROWS), _int(9), 8)
    verify.rejection_sample(_float(ROWS, VOCAB), _params(ROWS), _int(ROWS), _int(ROWS, 16), _float(ROWS, 16), _int(9))


def noise_words(target: Target) -> None:
    noise.noise(_meta(ROWS, dtype=torch.int64), _int(ROWS), _int(ROWS), _int(ROWS), _int(ROWS))


def packed(kind: str, n: int, k: int) -> PackedWeight:
    """A weight on the meta device: awq and gptq with groups of 128, GGUF kinds with groups of 32."""
    group = 128 if kind in ("awq", "gptq") else 32
    bits = 8 if kind == "Q8_0" else 4
    codes = _meta(k // 2, n, dtype=torch.uint8) if bits == 4 else _meta(k, n, dtype=torch.int8)
    scales = _meta(k // group, n, dtype=torch.float16)
    zeros = scales if kind in ("awq", "gptq", "Q4_0") else None
    minimums = scales if kind == "Q4_1" else None
    permutation = _int(k) if kind == "gptq" else None
    return PackedWeight(codes, scales, zeros, minimums, permutation, bits, group, n, k)


def quantised(target: Target, *, kind: str, tile: str, dtype: torch.dtype = torch.bfloat16, n: int = 4096) -> None:
    """tile is deterministic, small or large; n = 4096 splits K, 28672 does not."""
    m = 8 if tile == "small" else 256
    quant_linear.quant_linear(_meta(m, 4096, dtype=dtype), packed(kind, n, 4096), deterministic=tile == "deterministic")


def w8a8(target: Target, *, dtype: str, n: int = 4096) -> None:
    codes = torch.int8 if dtype == "int8" else _fp8(target)
    x, x_scale = linear.quantize_rows(_meta(ROWS, 4096), codes)
    linear.linear_w8a8(x, x_scale, _meta(n, 4096, dtype=codes), _float(n))


def dense(target: Target, *, dtype: torch.dtype, n: int = 4096, bias: bool = False) -> None:
    linear.linear(_meta(ROWS, 4096, dtype=dtype), _meta(n, 4096, dtype=dtype), _meta(n, dtype=dtype) if bias else None)


def _attention_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for head_dim, mode in itertools.product((64, 80, 96, 128, 256), ("prefill", "decode", "deterministic")):
        cases[f"attention-{mode}-{head_dim}"] = partial(attention, head_dim=head_dim, mode=mode)
    # Pairs of the remaining options, spread over head sizes and modes.
    for index, (block_size, dtype) in enumerate(itertools.product((16, 32, 64), (torch.float16, torch.bfloat16))):
        mode = ("prefill", "decode", "deterministic")[index % 3]
        name = f"attention-{mode}-block{block_size}-{str(dtype)[6:]}"
        cases[name] = partial(
            attention,
            head_dim=(64, 128)[index % 2],
            mode=mode,
            dtype=dtype,
            block_size=block_size,
            window=index % 2 == 0,
            softcap=index % 3 == 0,
            sinks=index >= 3,
            heads=((32, 8), (28, 4), (9, 3))[index % 3],
        )
    for head_dim, mode in ((64, "decode"), (128, "prefill"), (128, "decode"), (256, "deterministic")):
        cases[f"attention-fp8-{mode}-{head_dim}"] = partial(
            attention, head_dim=head_dim, mode=mode, fp8=True, window=head_dim == 64
        )
    return cases


def _other_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {
        "rope-write": partial(rope_write, fp8=False, interleaved=False),
        "rope-write-interleaved-partial": partial(rope_write, fp8=False, interleaved=True, head_dim=80, rotary_dim=32),
        "rope-write-fp8": partial(rope_write, fp8=True, interleaved=False),
        "norm-4096": norms,
        "norm-576": partial(norms, width=576),
        "activations": activations,
        "sampling": sample,
        "verification": verification,
        "noise": noise_words,
        "single-row": single,
        "w8a8-int8": partial(w8a8, dtype="int8"),
        "w8a8-fp8": partial(w8a8, dtype="fp8"),
        "w8a8-int8-wide": partial(w8a8, dtype="int8", n=28672),
        "w8a8-fp8-wide": partial(w8a8, dtype="fp8", n=28672),
        "linear-bf16": partial(dense, dtype=torch.bfloat16),
        "linear-fp16": partial(dense, dtype=torch.float16, bias=True),
        "linear-bf16-wide": partial(dense, dtype=torch.bfloat16, n=28672, bias=True),
        "linear-fp32": partial(dense, dtype=torch.float32),
    }
    for kind, tile in itertools.product(("awq", "gptq", "Q4_0", "Q4_1", "Q8_0"), ("deterministic", "small", "large")):
        cases[f"quant-{kind}-{tile}"] = partial(quantised, kind=kind, tile=tile)
    cases["quant-awq-fp16-wide"] = partial(quantised, kind="awq", tile="small", dtype=torch.float16, n=28672)
    return cases


CASES: dict[str, Case] = _attention_cases() | _other_cases()

# Compiled for every target in each test run: the hot path.
HOT = ("attention-deterministic-128", "quant-awq-deterministic")
# Compiled for one target each, so that each kernel and each target's special form is compiled in each test run.
ONCE = (
    ("attention-decode-128", "sm_90"),
    ("attention-prefill-64", "gfx942"),
    ("attention-fp8-decode-128", "sm_121"),
    ("attention-fp8-decode-128", "gfx942"),
    ("attention-deterministic-256", "sm_86"),
    ("rope-write", "sm_80"),
    ("rope-write-fp8", "gfx942"),
    ("norm-4096", "sm_86"),
    ("activations", "sm_121"),
    ("sampling", "sm_90"),
    ("verification", "sm_80"),
    ("single-row", "sm_89"),
    ("noise", "gfx942"),
    ("quant-Q4_1-small", "sm_89"),
    ("quant-Q8_0-large", "gfx942"),
    ("w8a8-int8", "sm_80"),
    ("w8a8-fp8", "sm_120"),
    ("linear-bf16", "sm_90"),
    ("linear-fp32", "sm_89"),
)


def supported(case: str, target: Target) -> bool:
    """Whether the target runs the case at all: fp8 needs a target with e4m3."""
    return target.fp8 is not None or "fp8" not in case


def named_set(name: str) -> list[tuple[str, str]]:
    """(case, target) pairs: "default", what each test run compiles; "all", every case on every target that runs it."""
    if name == "all":
        return [(case, target.name) for target in TARGETS.values() for case in CASES if supported(case, target)]
    return [(case, target) for target in TARGETS for case in HOT] + list(ONCE)
