"""What `tandem kernels list|check|bench` shows: choices with reasons, correctness on fresh inputs, speed.

Each function returns plain rows; `render` makes a text table of them. On a machine without a GPU, `check` and `bench`
run the reference against itself in other precision only where a kernel can run at all, and say what they left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kernels.dispatch import Choice, table


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison with the fp64 reference; error is the largest, relative to the largest wanted value."""

    operation: str
    dtype: str
    error: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        # NaN compares false.
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class Speed:
    """Median time of one call, and what it moved and computed by count."""

    operation: str
    shape: str
    milliseconds: float
    gigabytes_per_second: float
    gigaflops: float


def default_device() -> str:
    """ "cuda" with a GPU, "interpreter" under TRITON_INTERPRET=1, else "cpu"."""
    import os

    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "cpu"


def list_kernels(device: str | None = None, target: str | None = None) -> list[Choice]:
    """The dispatch table of a device; None: the machine's."""
    return table(device or default_device(), target=target)


def check_kernels(device: str | None = None, seed: int | None = None) -> list[Check]:
    """Runs each Triton kernel on small random inputs into poisoned outputs, against fp64 references.

    Raises RuntimeError where Triton kernels cannot run: no GPU, and not in the interpreter.
    """
    import torch

    device = device or default_device()
    if device == "cpu":
        raise RuntimeError(
            "no GPU here: TRITON_INTERPRET=1 runs the kernels slowly on the CPU, and "
            "`python -m kernels.triton.aot --set default` compiles them for seven targets"
        )
    from kernels.triton.checks import run_checks

    torch.manual_seed(time.time_ns() % 2**31 if seed is None else seed)
    small = device == "interpreter"
    return run_checks(torch.device("cpu" if small else device), small=small)


def bench_kernels(device: str | None = None) -> list[Speed]:
    """Median times of the main kernels at serving shapes.

    Raises RuntimeError without a GPU: the interpreter has no speed.
    """
    import torch

    if (device or default_device()) != "cuda":
        raise RuntimeError("no GPU here: speed of the Triton kernels can only be measured on one")
    from kernels.triton.checks import run_benchmarks

    return run_benchmarks(torch.device("cuda"), measure_cuda)


def measure_cuda(call: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds of a call on the GPU, by events, after three warm-up calls."""
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def render(rows: list[Choice] | list[Check] | list[Speed]) -> str:
    """A text table."""
    if not rows:
        return "nothing to show"
    lines: list[list[str]] = []
    for row in rows:
        if isinstance(row, Choice):
            lines.append([row.operation, row.dtype, row.implementation or "refused", row.reason])
        elif isinstance(row, Check):
            state = "ok" if row.passed else "WRONG"
            lines.append([row.operation, row.dtype, state, f"error {row.error:.2e} of {row.limit:.0e}", row.note])
        else:
            rates = f"{row.gigabytes_per_second:8.1f} GB/s  {row.gigaflops / 1000:8.2f} TFLOP/s"
            lines.append([row.operation, row.shape, f"{row.milliseconds:.4f} ms", rates])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
