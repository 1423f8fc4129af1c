"""What a narrower KV cache costs in accuracy: teacher-forced scores of the default model on texts of this repository.

fp8 has no CPU kernel: its rounding (e4m3, one fp32 scale per token and head, as the GPU kernels store it) is applied to
a KV cache of fp32 on the torch path. Prints a Markdown table. Run: python -m benchmarks.kv_dtype
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tandem.lm.kv import KVCache
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import SamplingParams, Sequence, Slice, TokenScore
from tandem.models.store import resolve
from tandem.tokenizer import Tokenizer, load_bundle

ROOT = Path(__file__).parents[1]
TEXTS = ("LICENSE", "docs/api.md", "docs/speculation.md")
_FP8_MAX = 448.0
_write = KVCache.write


@dataclass(frozen=True)
class Variant:
    """One way to run the model; `fp8`: KV is rounded to fp8 before it is stored."""

    name: str
    settings: dict[str, Any]
    fp8: bool = False


REFERENCE = Variant("fp32", {"dtype": "float32", "kv_dtype": "float32", "kernels": "native"})
VARIANTS = (
    Variant("fp32, KV bf16", {"dtype": "float32", "kv_dtype": "bfloat16", "kernels": "native"}),
    Variant("fp32, KV int8", {"dtype": "float32", "kv_dtype": "int8", "kernels": "native"}),
    Variant("fp32, KV fp8 (simulated)", {"dtype": "float32", "kv_dtype": "float32", "kernels": "torch"}, fp8=True),
    Variant("default dtype, KV bf16", {"kv_dtype": "bfloat16", "kernels": "native"}),
    Variant("default dtype, KV int8", {"kv_dtype": "int8", "kernels": "native"}),
)


def round_fp8(x: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, dim] through e4m3 with one scale per row and head."""
    scale = x.abs().amax(dim=-1, keepdim=True).float().clamp_min(1e-12) / _FP8_MAX
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _write_fp8(self: KVCache, layer: int, blocks: Any, offsets: Any, key: torch.Tensor, value: torch.Tensor) -> None:
    _write(self, layer, blocks, offsets, round_fp8(key), round_fp8(value))


def scores(variant: Variant, model: Path, texts: list[list[int]], threads: int) -> list[TokenScore]:
    """Scores of all texts' tokens but each first."""
    runner = load_runner(RunnerSettings(model, threads=threads, kv_cache_bytes=256 << 20, **variant.settings))
    found: list[TokenScore] = []
    with mock.patch.object(KVCache, "write", _write_fp8 if variant.fp8 else _write):
        for ids in texts:
            sequence = Sequence(1, 0, SamplingParams(temperature=0.0, prompt_logprobs=1), ids, len(ids))
            table = list(range(-(-len(ids) // runner.spec.block_size)))
            (output,) = runner.execute([Slice(sequence, table, 0, len(ids), score_prompt=True)])
            found += output.prompt_scores or []
    runner.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each text")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only", default="", help="variants whose name has this in it")
    options = parser.parse_args()
    model = resolve("smollm2-135m-instruct").path
    tokenizer = Tokenizer(load_bundle(model))
    texts = [tokenizer.encode((ROOT / name).read_text())[: options.tokens] for name in TEXTS]
    base = scores(REFERENCE, model, texts, options.threads)
    exact = np.array([score.logprob for score in base])
    best = np.array([score.top_ids[0] for score in base])
    print(f"{len(base)} tokens, perplexity of fp32 {np.exp(-exact.mean()):.3f}\n")
    print("| | mean abs. difference of logprobs | largest | top-1 agreement | perplexity |\n|---|---|---|---|---|")
    for variant in (variant for variant in VARIANTS if options.only in variant.name):
        found = scores(variant, model, texts, options.threads)
        logprobs = np.array([score.logprob for score in found])
        apart = np.abs(logprobs - exact)
        agree = np.mean(np.array([score.top_ids[0] for score in found]) == best)
        change = np.exp(exact.mean() - logprobs.mean()) - 1
        print(f"| {variant.name} | {apart.mean():.4f} | {apart.max():.2f} | {agree:.1%} | {change:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
