"""Ahead-of-time compilation for GPUs that are not there: records what the operations launch, and compiles exactly that.

An operation called on meta tensors inside `recorded()` launches nothing; each launch is kept with the specialisation
that Triton would choose (alignment of pointers and integers, constants), and `compile_launch` compiles it for a
target.

    python -m kernels.triton.aot --set default|all [--target sm_90] [--json PATH]
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernels.triton.targets import Target

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One recorded launch: kernel, types of its arguments, constants, alignments, options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def key(self) -> str:
        """Equal for launches that compile to the same code."""
        constants = sorted((place, str(value)) for place, value in self.constants.items())
        return repr((self.name, self.signature, constants, sorted(self.attributes), self.options))


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one kernel on one target. None: this compiler does not say."""

    case: str
    kernel: str
    target: str
    seconds: float
    shared: int
    shared_limit: int
    registers: int | None
    spills: int | None
    error: str | None = None

    @property
    def fits(self) -> bool:
        return self.error is None and self.shared <= self.shared_limit


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, launches of Triton kernels are appended to the list instead of run."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(self, args, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def _launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    from triton.runtime.jit import mangle_type

    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, param in enumerate(kernel.params):
        value = bound[param.name]
        if param.is_constexpr or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
            signature[param.name] = "constexpr"
            constants[(index,)] = value
            continue
        signature[param.name] = mangle_type(value)
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return Launch(kernel, signature, constants, attributes, options)


def compile_launch(launch: Launch, target: Target, case: str = "") -> Compiled:
    """Compiles one launch. A compiler error is in the result, not raised."""
    import triton
    from triton.compiler import ASTSource

    started = time.monotonic()
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    error, shared, registers, spills = None, 0, None, None
    try:
        compiled = triton.compile(source, target=target.gpu_target(), options=launch.options)
        shared = compiled.metadata.shared
        registers, spills = _resources(compiled.asm, target)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"[:2000]
    seconds = time.monotonic() - started
    return Compiled(case, launch.name, target.name, seconds, shared, target.shared_limit, registers, spills, error)


def _resources(asm: dict[str, Any], target: Target) -> tuple[int | None, int | None]:
    """(registers per thread, spilled bytes or registers) out of the compiled object, where a tool tells."""
    if target.backend == "hip":
        text = asm.get("amdgcn", "")
        registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
        spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
        return (int(registers[1]) if registers else None, int(spills[1]) if spills else None)
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file() or "cubin" not in asm:
        return None, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        done = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else (None, None)


def compile_cases(names: list[tuple[str, str]]) -> Iterator[Compiled]:
    """Compiles the launches of (case, target name) pairs, each distinct launch once per target."""
    from kernels.triton.aot_cases import CASES
    from kernels.triton.configs import for_target
    from kernels.triton.targets import TARGETS

    seen: set[tuple[str, str]] = set()
    for case, target_name in names:
        target = TARGETS[target_name]
        with for_target(target_name), recorded() as launches:
            CASES[case](target)
        for launch in launches:
            if (launch.key(), target_name) not in seen:
                seen.add((launch.key(), target_name))
                yield compile_launch(launch, target, case)


def main(arguments: list[str] | None = None) -> int:
    """Compiles a set, prints one line per kernel; 1 if anything fails or exceeds its target's shared memory."""
    import argparse
    import dataclasses
    import json

    from kernels.triton.aot_cases import named_set

    parser = argparse.ArgumentParser(prog="python -m kernels.triton.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--set", default="default", choices=("default", "all"))
    parser.add_argument("--target", default=None, help="only this target")
    parser.add_argument("--json", default=None, help="write the results to this file")
    options = parser.parse_args(arguments)
    pairs = [pair for pair in named_set(options.set) if options.target in (None, pair[1])]
    results = []
    for result in compile_cases(pairs):
        results.append(result)
        state = "ok" if result.fits else result.error or "exceeds shared memory"
        print(
            f"{result.target:7} {result.kernel:26} {result.case:34} shared {result.shared:6} / {result.shared_limit:6}"
            f"  registers {result.registers}  spills {result.spills}  {result.seconds:4.1f} s  {state}",
            flush=True,
        )
    if options.json:
        Path(options.json).write_text(json.dumps([dataclasses.asdict(result) for result in results]))
    return 0 if results and all(result.fits for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
