"""Checks and measurements of each kernel, sized by a scale: small in the interpreter, serving shapes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.packing import PackedWeight, pack
from kernels.reference import attention as ref_attention
from kernels.reference import linear as ref_linear
from kernels.reference import norm as ref_norm
from kernels.reference import sampling as ref_sampling
from kernels.report import Check, Speed
from kernels.triton import kv_write, linear, norm, quant_linear, sampling, verify
from kernels.triton.attention import AttentionBatch, paged_attention
from kernels.triton.configs import check_fp8, current_target
from kernels.triton.targets import TARGETS

# Largest error that the output's rounding explains, relative to the largest value.
LIMITS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True, slots=True)
class Paged:
    """Queries over a paged cache whose unused slots are NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    batch: AttentionBatch


def fp8_dtype() -> torch.dtype | None:
    """The e4m3 of the target in use; None where it has none. The interpreter takes e4m3fn."""
    target = TARGETS.get(current_target())
    dtype = torch.float8_e4m3fn if target is None else getattr(torch, target.torch_fp8)
    try:
        check_fp8(dtype)
    except ValueError:
        return None
    return dtype


def paged_inputs(
    contexts: list[int],
    queries: list[int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_size: int = 16,
    fp8: torch.dtype | None = None,
) -> Paged:
    """Random sequences of `contexts` KV lengths with `queries` rows each, blocks scattered, unused slots poisoned."""
    widest = -(-max(contexts) // block_size)
    blocks = len(contexts) * widest + 1
    tables = torch.randperm(blocks, device=device)[: len(contexts) * widest].view(-1, widest).int()
    shape = (blocks, heads[1], block_size, head_dim)
    k, v = (torch.randn(shape, device=device).to(dtype).to(fp8 or dtype) for _ in range(2))
    k_scale, v_scale = (torch.rand(shape[:3], device=device) + 0.5 for _ in range(2)) if fp8 else (None, None)
    used = torch.zeros(blocks, block_size, dtype=torch.bool, device=device)
    for sequence, length in enumerate(contexts):
        places = torch.arange(length, device=device)
        used[tables[sequence].long()[places // block_size], places % block_size] = True
    poison = torch.tensor(float("nan"), device=device).to(fp8 or dtype)
    for cache in (k, v):
        # fp8 has no masked fill on every device: go through its bytes.
        raw, bits = (cache.view(torch.uint8), poison.view(torch.uint8)) if fp8 else (cache, poison)
        raw.permute(0, 2, 1, 3)[~used] = bits
    starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32, device=device)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    q = torch.randn(sum(queries), heads[0], head_dim, device=device).to(dtype)
    return Paged(q, k, v, k_scale, v_scale, AttentionBatch(starts, lengths, tables, max(queries), max(contexts)))


def packed_inputs(n: int, k: int, bits: int, group: int, device: torch.device) -> PackedWeight:
    """A random weight of the packed layout, with zero points for four bits."""
    low, high = (0, 16) if bits == 4 else (-127, 128)
    codes = torch.randint(low, high, (k, n), device=device)
    scales = (torch.rand(k // group, n, device=device) * 0.02 + 0.001).half()
    zeros = torch.randint(0, 16, (k // group, n), device=device) if bits == 4 else None
    return pack(codes, scales, group, bits, zeros=zeros)


def _error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest wanted value; NaN if any value is."""
    return float((out.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30))


def _check_attention(device: torch.device, small: bool) -> list[Check]:
    found = []
    shapes = [("prefill", [70, 33], [20, 9]), ("decode", [5, 80], [1, 1]), ("verify", [70], [3])]
    kinds: list[tuple[torch.dtype, torch.dtype | None]] = [(torch.bfloat16, None)]
    if not small:
        shapes = [
            ("prefill", [2049, 700, 16], [2049, 600, 1]),
            ("decode", [1, 15, 16, 17, 3000, 5000], [1] * 6),
            ("verify", [4000, 33, 1500], [5, 4, 8]),
        ]
        kinds.append((torch.float16, None))
    if (fp8 := fp8_dtype()) is not None:
        kinds.append((torch.bfloat16, fp8))
    heads, head_dim, split = ((4, 2), 64, 64) if small else ((32, 8), 128, 1024)
    for name, contexts, queries in shapes:
        for dtype, kv in kinds:
            case = paged_inputs(contexts, queries, heads, head_dim, dtype, device, fp8=kv)
            scales: dict[str, Any] = {"k_scale": case.k_scale, "v_scale": case.v_scale}
            batch, scale = case.batch, head_dim**-0.5
            lists = (batch.query_start, batch.context_lens, batch.block_tables)
            window = max(contexts) - 5
            wanted = ref_attention.paged_attention(case.q, case.k, case.v, *lists, scale=scale, window=window, **scales)
            outs = []
            for parallel in (False, True):
                out = torch.full_like(case.q, float("nan"))
                options: dict[str, Any] = scales | {"split_size": split, "parallel_splits": parallel, "out": out}
                paged_attention(case.q, case.k, case.v, batch, scale=scale, window=window, **options)
                outs.append(out)
            note = "splits in order and parallel: equal bits" if torch.equal(*outs) else "BITS DIFFER between splits"
            error = _error(outs[0], wanted) if torch.equal(*outs) else float("inf")
            kind = f"{dtype}".removeprefix("torch.") + (" fp8 KV" if kv else "")
            found.append(Check(f"attention {name}", kind, error, LIMITS[dtype], note))
    return found


def _check_rows(device: torch.device) -> list[Check]:
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        x, residual = (torch.randn(3, 576, device=device).to(dtype) for _ in range(2))
        weight, out = torch.randn(576, device=device), torch.full_like(x, float("nan"))
        wanted = ref_norm.rms_norm(x.double(), weight.double(), 1e-5, residual.double())
        norm.rms_norm(x, weight, 1e-5, residual.clone(), out)
        # The residual is rounded before it is normalised, the fp64 reference's is not: two roundings.
        found.append(Check("rms_norm", name, _error(out, wanted), 2 * LIMITS[dtype]))
        gate_up = torch.randn(3, 1200, device=device).to(dtype)
        for activation in norm.ACTIVATIONS:
            out = torch.full((3, 600), float("nan"), device=device).to(dtype)
            norm.activation_and_mul(gate_up, activation, out)
            wanted = ref_norm.activation_and_mul(gate_up.double(), activation)
            found.append(Check(f"{activation}_and_mul", name, _error(out, wanted), LIMITS[dtype]))
    return found


def _check_kv_write(device: torch.device) -> list[Check]:
    found: list[Check] = []
    table = ref_attention.rotary_table(64, 64).to(device)
    positions = torch.arange(5, dtype=torch.int32, device=device) * 9
    slots = torch.tensor([3, 17, -1, 40, 0], device=device)
    for fp8 in (None, fp8_dtype()):
        if fp8 is None and found:
            continue
        q, k, v = (torch.randn(5, heads, 64, device=device).bfloat16() for heads in (8, 2, 2))
        kind = fp8 or torch.bfloat16
        caches = [torch.zeros(4, 2, 16, 64, device=device).to(kind) for _ in range(4)]
        scales = [torch.zeros(4, 2, 16, device=device) if fp8 else None for _ in range(4)]
        wanted_q, wanted_k = (ref_attention.rotate(x, positions, table) for x in (q, k))
        ref_attention.write_kv(wanted_k, v, caches[0], caches[1], slots, scales[0], scales[1])
        kv_write.rope_write_kv(
            q, k, v, table, positions, slots, caches[2], caches[3], k_scale=scales[2], v_scale=scales[3]
        )
        errors = [_error(q, wanted_q), *(_error(caches[i + 2].float(), caches[i].float()) for i in range(2))]
        # One step of e4m3 is an eighth; a value on a rounding boundary may fall either way.
        limit = 0.13 if fp8 else LIMITS[torch.bfloat16]
        found.append(Check("rope_write_kv", "fp8" if fp8 else "bfloat16", max(errors), limit))
    return found


def _check_linears(device: torch.device, small: bool) -> list[Check]:
    found = []
    m, n, k = (5, 40, 1152) if small else (147, 1030, 4096)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
        out = linear.linear(x, weight)
        same = torch.equal(out[4:5], linear.linear(x[4:5], weight))
        error = _error(out, ref_linear.linear(x, weight)) if same else float("inf")
        note = "a row alone: equal bits" if same else "BITS DIFFER for a row alone"
        found.append(Check("linear", str(dtype).removeprefix("torch."), error, LIMITS[dtype], note))
    for codes in (torch.int8, fp8_dtype()):
        if codes is not None:
            x, x_scale = linear.quantize_rows(torch.randn(m, k, device=device), codes)
            weight, w_scale = linear.quantize_rows(torch.randn(n, k, device=device), codes)
            out = linear.linear_w8a8(x, x_scale, weight, w_scale, out_dtype=torch.float32)
            wanted = ref_linear.linear_w8a8(x.float(), x_scale, weight.float(), w_scale)
            # fp8 tensor cores may keep fewer bits inside a dot.
            limit = LIMITS[torch.float32] if codes == torch.int8 else 2e-3
            found.append(Check("linear_w8a8", str(codes).removeprefix("torch."), _error(out, wanted), limit))
    for bits, group in ((4, 128), (4, 32), (8, 32)):
        packed = packed_inputs(n, k, bits, group, device)
        x = torch.randn(m, k, device=device).bfloat16()
        out = quant_linear.quant_linear(x, packed)
        same = torch.equal(out[4:5], quant_linear.quant_linear(x[4:5], packed))
        error = _error(out, ref_linear.quant_linear(x, packed)) if same else float("inf")
        note = "a row alone: equal bits" if same else "BITS DIFFER for a row alone"
        found.append(Check("quant_linear", f"{bits} bits, groups of {group}", error, LIMITS[torch.bfloat16], note))
    return found


def _check_sampling(device: torch.device) -> list[Check]:
    """Survivors of truncation and greedy answers against the references; noise is checked for its range and mean."""
    rows, vocab = 4, 3000

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, device=device).to(dtype)

    params = sampling.RowParams(
        column([0.0, 1.0, 0.7, 1.3], torch.float32),
        column([0.0, 0.0, 0.05, 0.0], torch.float32),
        column([0, 40, 0, 7], torch.int32),
        column([1.0, 0.9, 1.0, 0.6], torch.float32),
        torch.randint(-(2**62), 2**62, (rows,), device=device),
        *(torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(3)),
    )
    logits = torch.randn(rows, vocab, device=device) * 3
    tokens = sampling.sample(logits, params).cpu()
    wrong = int(tokens[0] != logits[0].argmax().cpu())
    for row in range(1, rows):
        limits = (float(params.min_ps[row]), int(params.top_ks[row]), float(params.top_ps[row]))
        kept = ref_sampling.survivors(logits[row].cpu() / float(params.temperatures[row]), *limits)
        wrong += not bool(kept[tokens[row]])
    found = [Check("sample", "float32", float(wrong), 0.0, "sampled tokens survive truncation; greedy is the argmax")]
    logprobs, _ranks = sampling.token_scores(logits, tokens.int().to(device))
    wanted = torch.log_softmax(logits.double(), -1)[torch.arange(rows), tokens.long().to(device)]
    found.append(Check("token_scores", "float32", _error(logprobs, wanted), 1e-5))
    sampled = torch.tensor([5, 6, 7, 8, 9], dtype=torch.int32, device=device)
    drafts = torch.tensor([5, 1, 0, 8, 0], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    kept_drafts = verify.keep_while_equal(sampled, drafts, starts, 3).tolist()
    found.append(Check("keep_while_equal", "int32", float(kept_drafts != [1, 1]), 0.0))
    return found


def run_checks(device: torch.device, *, small: bool) -> list[Check]:
    """Every kernel against its fp64 reference, on fresh inputs and poisoned outputs; small: interpreter sizes."""
    sized = (_check_attention, _check_linears)
    found = [check for group in sized for check in group(device, small)]
    return found + [check for group in (_check_rows, _check_kv_write, _check_sampling) for check in group(device)]


def _speed(name: str, shape: str, milliseconds: float, gigabytes: float, gigaflop: float) -> Speed:
    seconds = milliseconds / 1e3
    return Speed(name, shape, milliseconds, gigabytes / seconds, gigaflop / seconds)


def run_benchmarks(
    device: torch.device, measure: Callable[[Callable[[], object]], float], *, scale: float = 1.0
) -> list[Speed]:
    """Times of the main kernels; `scale` shrinks lengths and widths (1 = serving shapes of an 8B model)."""

    def size(value: int, multiple: int = 64) -> int:
        return max(multiple, int(value * scale) // multiple * multiple)

    heads, dim, found = (32, 8), 128, []
    dtype = torch.bfloat16
    for sequences, context, query in ((1, 8192, 1), (64, 2048, 1), (64, 2048, 4), (1, 4096, 4096)):
        count, context = max(1, int(sequences * scale)), size(context)
        query = min(query, context) if query < 64 else context
        case = paged_inputs([context] * count, [query] * count, heads, dim, dtype, device)
        time = measure(partial(paged_attention, case.q, case.k, case.v, case.batch, scale=dim**-0.5))
        kv_bytes = 2 * count * context * heads[1] * dim * 2 + 2 * case.q.nbytes
        # Causal: a row at position p meets p + 1 keys.
        pairs = count * sum(range(context - query + 1, context + 1))
        shape = f"{count} × {query} rows, context {context}"
        found.append(_speed("attention", shape, time, kv_bytes / 1e9, 4 * pairs * heads[0] * dim / 1e9))
    for m in (1, 16, 256):
        n, k = size(4096), size(4096, 128)
        x = torch.randn(m, k, device=device).to(dtype)
        packed = packed_inputs(n, k, 4, 128, device)
        time = measure(partial(quant_linear.quant_linear, x, packed))
        flop = 2 * m * n * k / 1e9
        found.append(_speed("quant_linear", f"{m} × {n} × {k}, 4 bits", time, packed.nbytes / 1e9, flop))
        weight = torch.randn(n, k, device=device).to(dtype)
        time = measure(partial(linear.linear, x, weight))
        found.append(_speed("linear", f"{m} × {n} × {k}, bf16", time, weight.nbytes / 1e9, flop))
        codes, scales = linear.quantize_rows(x, torch.int8)
        w_codes, w_scales = linear.quantize_rows(weight, torch.int8)
        time = measure(partial(linear.linear_w8a8, codes, scales, w_codes, w_scales))
        found.append(_speed("linear_w8a8", f"{m} × {n} × {k}, int8", time, w_codes.nbytes / 1e9, flop))
    rows, width = size(256, 16), size(4096)
    x, weight = torch.randn(rows, width, device=device).to(dtype), torch.ones(width, device=device)
    time = measure(lambda: norm.rms_norm(x, weight, 1e-5))
    found.append(_speed("rms_norm", f"{rows} × {width}", time, 2 * x.nbytes / 1e9, 4 * x.numel() / 1e9))
    return found
