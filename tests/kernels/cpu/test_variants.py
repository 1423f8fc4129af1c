"""The other tests of this folder once more on instrumented and emulated builds of the library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import cpu
from kernels.cpu.build import SIMDE_VARIABLE, build, compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FOLDER = Path(__file__).parent


def run_tests(environment: dict[str, str], selection: str) -> None:
    files = [str(FOLDER / f"test_{name}.py") for name in ("linear", "pack", "decoder", "sampling")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "timeout=900", *files]
    done = subprocess.run(
        [*command, "-k", selection],
        env={**os.environ, **environment},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]


def test_no_sanitizer_complains() -> None:
    """AddressSanitizer and UBSan: every kernel of the instruction sets that this machine runs."""
    cxx = compiler()
    if cxx is None or sys.platform != "linux":
        pytest.skip("needs a compiler on Linux")
    runtime = subprocess.run([cxx, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_absolute():
        pytest.skip(f"{cxx} has no AddressSanitizer runtime")
    library = build(variant="sanitize")
    environment = {
        cpu.LIBRARY_VARIABLE: str(library),
        # Python and its extensions leak by design and are not instrumented.
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LD_PRELOAD": runtime,
    }
    run_tests(environment, "not avx512")


def test_avx512_under_emulation() -> None:
    """The AVX-512 units with SIMDe's intrinsics, where the CPU lacks them. Set TANDEM_SIMDE to its folder."""
    if not os.environ.get(SIMDE_VARIABLE):
        pytest.skip(f"{SIMDE_VARIABLE} names no folder")
    environment = {cpu.LIBRARY_VARIABLE: str(build(variant="emulated"))}
    run_tests(environment, "avx512 and not bits_do_not_depend_on_batch")
    run_tests(environment, "avx512 and bits_do_not_depend_on_batch and (Q4_1 or Q8_0 or Q6_K or BF16)")
