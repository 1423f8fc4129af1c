"""Builds the shared library of the CPU kernels: `python -m kernels.cpu.build [--force] [--variant V]`.

One translation unit per instruction set, each with its own flags; the rest is compiled for the baseline of the
architecture, so one library runs on every machine of it and picks its kernels at run time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "src"
COMMON_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall"]
COMMON_FLAGS += ["-Wextra", "-Wno-unused-parameter", "-Wno-unused-function", "-Wno-unknown-pragmas", "-Wno-psabi"]
SANITIZE_FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"]
# Where SIMDe's headers lie (https://github.com/simd-everywhere/simde), for the emulated variant.
SIMDE_VARIABLE = "TANDEM_SIMDE"
# release: what is shipped. sanitize: AddressSanitizer and UBSan. emulated: the AVX-512 units on a CPU with AVX2.
VARIANTS = ("release", "sanitize", "emulated")

_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512"]
ISA_FLAGS: dict[str, list[str]] = {
    "isa_generic": [],
    "isa_avx2": _AVX2,
    "isa_avx512": _AVX512,
    "isa_avx512bf16": [*_AVX512, "-mavx512bf16"],
}


class BuildError(RuntimeError):
    """The library could not be compiled; the message holds the reason."""


def compiler() -> str | None:
    """The C++ compiler to use: $CXX, else g++, else clang++; None if there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    return None


def library_path(variant: str = "release") -> Path:
    """Where the library lies: beside this file, or in the user's cache when that folder is read-only."""
    suffix = sysconfig.get_config_var("SHLIB_SUFFIX") or ".so"
    name = f"libtandem_cpu{'' if variant == 'release' else f'_{variant}'}-{source_digest()}{suffix}"
    here = Path(__file__).parent / name
    if here.exists() or os.access(here.parent, os.W_OK):
        return here
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "tandem"
    return cache / name


def source_digest() -> str:
    """A digest over sources and flags: a library of other sources is never loaded by mistake."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((COMMON_FLAGS, sorted(ISA_FLAGS.items()))).encode())
    return digest.hexdigest()


def _x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _flags(source: Path, variant: str) -> list[str]:
    flags = [*COMMON_FLAGS, *(ISA_FLAGS.get(source.stem, []) if _x86() else [])]
    if variant == "sanitize":
        # Instrumented, each unit takes a minute or more: only what this machine runs.
        flags = [*COMMON_FLAGS, *([] if source.stem.startswith("isa_avx512") else ISA_FLAGS.get(source.stem, []))]
        flags += SANITIZE_FLAGS
    if variant == "emulated":
        flags += ["-DTD_EMULATED_AVX512"]
        if source.stem.startswith("isa_avx512"):
            folder = os.environ.get(SIMDE_VARIABLE)
            if not folder:
                raise BuildError(f"the emulated variant needs {SIMDE_VARIABLE}: the folder that holds simde/")
            # Optimising, g++ 12 fails on these headers.
            flags = [*COMMON_FLAGS, *_AVX2, "-O0", "-w", "-DTD_EMULATED_AVX512", "-DSIMDE_ENABLE_NATIVE_ALIASES"]
            flags += [f"-I{folder}"]
    return flags


def _compile(cxx: str, source: Path, out: Path, variant: str) -> Path:
    flags = _flags(source, variant)
    target = out / f"{source.stem}.o"
    done = subprocess.run([cxx, *flags, "-c", str(source), "-o", str(target)], capture_output=True, text=True)
    if done.returncode and source.stem in ISA_FLAGS and source.stem != "isa_generic":
        # A compiler too old for an instruction set: the unit then compiles to "not available".
        flags = [f for f in flags if not f.startswith("-m")]
        done = subprocess.run([cxx, *flags, "-c", str(source), "-o", str(target)], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{cxx} failed on {source.name}:\n{done.stderr[-4000:]}")
    return target


def build(force: bool = False, variant: str = "release") -> Path:
    """Compiles the library unless it is there already, and returns its path.

    Raises BuildError without a compiler or when compiling fails.
    """
    target = library_path(variant)
    if target.exists() and not force:
        return target
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler: install g++ or clang++, or set CXX")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        sources = sorted(SOURCE_DIR.glob("*.cpp"))
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as jobs:
            objects = list(jobs.map(lambda s: _compile(cxx, s, out, variant), sources))
        # The name is taken in one step, so that nobody loads half a library.
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".tandem_cpu", delete=False) as part:
            pass
        sanitize = SANITIZE_FLAGS if variant == "sanitize" else []
        link = [cxx, "-shared", *sanitize, *map(str, objects), "-o", part.name, "-lpthread"]
        done = subprocess.run(link, capture_output=True, text=True)
        if done.returncode:
            os.unlink(part.name)
            raise BuildError(f"{cxx} failed to link:\n{done.stderr[-4000:]}")
        os.chmod(part.name, 0o755)
        os.replace(part.name, target)
    _remove_stale(target)
    return target


def _remove_stale(target: Path) -> None:
    prefix = target.name.split("-")[0] + "-"
    for other in target.parent.glob(f"{prefix}*"):
        if other != target:
            other.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the CPU kernels.")
    parser.add_argument("--force", action="store_true", help="compile even if the library is there")
    parser.add_argument("--variant", choices=VARIANTS, default="release", help="sanitize and emulated are for tests")
    options = parser.parse_args(argv)
    try:
        print(build(options.force, options.variant))
    except BuildError as error:
        print(f"kernels.cpu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
