"""CPU kernels: a C++ library behind a plain C ABI, called through ctypes (which releases the GIL).

`available()` says whether the library can be used here, and `reason()` why not; callers then take the torch path.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from kernels.cpu import abi
from kernels.cpu.build import BuildError, build, library_path

ISA_LEVELS = ("generic", "avx2", "avx512", "avx512bf16")
# Goes up when a level computes a step in other bits than before; part of the numerics id. Levels not named are at 1.
ARITHMETIC = {"avx512bf16": 2}
# Forces a lower instruction set than the best, for tests and comparisons.
ISA_VARIABLE = "TANDEM_CPU_ISA"
# Loads this library file instead of the release build, for tests of its variants.
LIBRARY_VARIABLE = "TANDEM_CPU_LIBRARY"


@cache
def _load() -> tuple[Any | None, str]:
    try:
        given = os.environ.get(LIBRARY_VARIABLE, "")
        path = Path(given) if given else library_path()
        if not given and not path.exists():
            path = build()
        library = abi.load(path)
    except (BuildError, OSError) as error:
        return None, str(error)
    wanted = os.environ.get(ISA_VARIABLE, "")
    if wanted and library.td_select_isa(wanted.encode()) != 0:
        return None, f"{ISA_VARIABLE}={wanted}: this machine or build runs only {', '.join(_levels(library))}"
    return library, ""


def _levels(library: Any) -> list[str]:
    return [level for level in ISA_LEVELS if library.td_isa_runs(level.encode())]


def available() -> bool:
    """Whether the native kernels can be used; compiles them on first use if a compiler is there."""
    return _load()[0] is not None


def reason() -> str:
    """Why the kernels are not available; empty if they are."""
    return _load()[1]


def library() -> Any:
    """The loaded library. Raises RuntimeError with the reason when it is not available."""
    loaded, why = _load()
    if loaded is None:
        raise RuntimeError(f"CPU kernels are not available: {why}")
    return loaded


def isa() -> str:
    """The instruction set in use: one of ISA_LEVELS."""
    return str(library().td_isa().decode())


def arithmetic() -> int:
    """Version of what the instruction set in use computes: answers are equal bit for bit within one."""
    return ARITHMETIC.get(isa(), 1)


def isa_levels() -> list[str]:
    """The instruction sets that this machine and build can run, lowest first."""
    return _levels(library())


def select_isa(level: str) -> None:
    """Switches the process to an instruction set; decoders made before keep theirs.

    Raises ValueError if it can't run here.
    """
    if library().td_select_isa(level.encode()) != 0:
        raise ValueError(f"instruction set {level!r} can't run here; it runs {', '.join(isa_levels())}")


def set_threads(count: int) -> int:
    """Sets the size of the process's thread pool; decoders made before keep theirs. Returns the size."""
    if count < 1:
        raise ValueError(f"threads must be at least 1, got {count}")
    return int(library().td_set_threads(count))
