"""Where the time of a step on the CPU kernels goes, on this machine, in one process.

    python -m benchmarks.cpu_profile                     decode steps, verification steps and a long prompt
    python -m benchmarks.cpu_profile --rows 1 32 --context 512 --prompt 0

Decode: M sequences of one row each. Verification: M rows of one sequence. Each column is the median over steps of one
part of the native call, waiting at its barriers included; `call` is the whole call as Python sees it. GOP/s counts a
multiply and an add as two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass

import numpy as np

from kernels import cpu
from kernels.cpu.decoder import PARTS, Decoder, DecoderModel, KvCache
from tandem.lm.loading import load_model
from tandem.lm.models.compiled import CompiledModel
from tandem.lm.runner_settings import RunnerSettings
from tandem.models.store import resolve

_BLOCK = 16


@dataclass(frozen=True)
class Timing:
    """Medians over steps, ms: the call, and each part of it."""

    call: float
    parts: dict[str, float]


class Steps:
    """Steps over one cache: M sequences with `context` tokens each, of zeros (time does not depend on values)."""

    def __init__(self, model: DecoderModel, rows: int, context: int, kv_dtype: str, positions: int) -> None:
        self._model, self._context = model, context
        self._blocks = -(-(context + rows) // _BLOCK)
        used = max(rows, 1) * self._blocks
        # As large as an engine's, so that it lies in pages of the same size.
        size = KvCache.block_bytes(len(model.layers), model.kv_heads, model.head_dim, _BLOCK, kv_dtype)
        self._cache = KvCache(model, max(used, (1 << 30) // size), _BLOCK, kv_dtype)
        for array in (*self._cache.keys, *self._cache.values):
            array[:used] = 0
        self._decoder = Decoder(model, self._cache, max(rows, 1024), max(rows, 64), positions)
        self._logits = np.empty((max(rows, 64), model.vocab), np.float32)

    def decode(self, rows: int, repeats: int) -> Timing:
        """One row of each of `rows` sequences, all with logits."""
        tables = np.arange(rows * self._blocks, dtype=np.int32).reshape(rows, self._blocks)
        starts = np.full(rows, self._context, np.int32)
        return self._run(np.arange(rows + 1, dtype=np.int32), starts, tables, rows, repeats)

    def verify(self, rows: int, repeats: int) -> Timing:
        """`rows` rows of one sequence, all with logits."""
        table = np.arange(self._blocks, dtype=np.int32)[None]
        return self._run(np.asarray([0, rows], np.int32), np.asarray([self._context], np.int32), table, rows, repeats)

    def _run(self, row_start: np.ndarray, start: np.ndarray, tables: np.ndarray, rows: int, repeats: int) -> Timing:
        tokens, out = np.arange(rows, dtype=np.int32) + 100, np.arange(rows, dtype=np.int32)
        calls, parts = [], []
        for step in range(repeats + 2):
            before = time.perf_counter()
            with self._decoder.profiled() as times:
                self._decoder.forward(tokens, row_start, start, tables, out, self._logits[:rows])
            if step >= 2:
                calls.append(time.perf_counter() - before)
                parts.append(times.copy())
        return _medians(calls, parts)

    def prompt(self, tokens: int, chunk: int) -> list[Timing]:
        """A prompt in chunks; only the last row wants logits."""
        table = np.arange(-(-tokens // _BLOCK), dtype=np.int32)[None]
        found = []
        for at in range(0, tokens, chunk):
            size = min(chunk, tokens - at)
            out = np.asarray([size - 1] if at + size == tokens else [], np.int32)
            before = time.perf_counter()
            with self._decoder.profiled() as times:
                self._decoder.forward(
                    np.arange(size, dtype=np.int32), np.asarray([0, size], np.int32), np.asarray([at], np.int32), table,
                    out, self._logits[: len(out)] if len(out) else None,
                )  # fmt: skip
            found.append(_medians([time.perf_counter() - before], [times.copy()]))
        return found

    def close(self) -> None:
        self._decoder.close()


def _medians(calls: list[float], parts: list[np.ndarray]) -> Timing:
    middle = np.median(np.asarray(parts), axis=0) / 1e6
    return Timing(statistics.median(calls) * 1e3, dict(zip(PARTS, middle.tolist(), strict=True)))


def linear_ops(model: DecoderModel) -> tuple[float, float]:
    """Operations per row: of the layers' linears, and of the head."""
    layer = sum(getattr(model.layers[0], name).n * getattr(model.layers[0], name).k for name in _NAMES)
    return 2.0 * len(model.layers) * layer, 2.0 * model.head.n * model.head.k


_NAMES = ("q", "k", "v", "o", "gate", "up", "down")
_LINEAR = ("qkv", "out", "gate_up", "down")


def _row(name: str, timing: Timing, extra: str) -> str:
    cells = " | ".join(f"{timing.parts[part]:.2f}" for part in PARTS)
    return f"| {name} | {timing.call:.2f} | {cells} | {extra} |"


def _head(first: str, last: str) -> str:
    titles = [first, "call", *PARTS, last]
    return f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|"


def decode_table(model: DecoderModel, options: argparse.Namespace, kind: str) -> list[str]:
    body, head = linear_ops(model)
    lines = [f"\n{kind}, {options.context} tokens of context, ms", _head("M", "GOP/s layers, head")]
    steps = Steps(model, max(options.rows), options.context, options.kv_dtype, options.context + max(options.rows))
    for rows in options.rows:
        timing = getattr(steps, kind)(rows, options.repeats if rows < 16 else max(3, options.repeats // 3))
        spent = sum(timing.parts[part] for part in _LINEAR)
        rate = f"{body * rows / spent / 1e6:.0f}, {head * rows / timing.parts['head'] / 1e6:.0f}"
        lines.append(_row(str(rows), timing, rate))
    steps.close()
    return lines


def prompt_table(model: DecoderModel, options: argparse.Namespace) -> list[str]:
    tokens, chunk = options.prompt, options.chunk
    body, _ = linear_ops(model)
    steps = Steps(model, 1, tokens, options.kv_dtype, tokens + 1)
    steps.prompt(min(chunk, tokens), chunk)
    timings = steps.prompt(tokens, chunk)
    steps.close()
    total = Timing(sum(t.call for t in timings), {part: sum(t.parts[part] for t in timings) for part in PARTS})
    lines = [f"\nprompt of {tokens} tokens in chunks of {chunk}, ms", _head("chunk", "GOP/s layers, attention")]
    layers, heads = len(model.layers), model.heads * model.head_dim
    rows = [(str(i + 1), t, min(chunk, tokens - i * chunk), i * chunk) for i, t in enumerate(timings)]
    for name, timing, size, at in [*rows, ("all", total, tokens, 0)]:
        spent = sum(timing.parts[part] for part in _LINEAR)
        pairs = size * at + size * (size + 1) / 2
        rate = 4.0 * layers * heads * pairs / timing.parts["attention"] / 1e6
        lines.append(_row(name, timing, f"{body * size / spent / 1e6:.0f}, {rate:.0f}"))
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="name or .gguf file")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 3, 4, 8, 16, 32])
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the long prompt; 0: none")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-dtype", default="bfloat16")
    options = parser.parse_args(argv)
    settings = RunnerSettings(model_path=resolve(options.model).path, threads=options.threads, kernels="native")
    loaded = load_model(settings, lambda done, total: None)
    assert isinstance(loaded.model, CompiledModel)
    model = loaded.model.decoder_model
    print(f"{cpu.isa()}, {options.threads} threads, {loaded.model.weight_bytes / 1e6:.1f} MB of weights", flush=True)
    for kind in ("decode", "verify") if options.rows else ():
        print("\n".join(decode_table(model, options, kind)), flush=True)
    if options.prompt:
        print("\n".join(prompt_table(model, options)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
