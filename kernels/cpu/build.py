"""Builds the shared library of the CPU kernels: `python -m kernels.cpu.build [--sanitize] [--force]`.

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


def library_path(sanitize: bool = False) -> Path:
    """Where the library lies: beside this file, or in the user's cache when that folder is read-only."""
    suffix = sysconfig.get_config_var("SHLIB_SUFFIX") or ".so"
    name = f"libtandem_cpu{'_san' if sanitize else ''}-{source_digest()}{suffix}"
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


def _compile(cxx: str, source: Path, out: Path, sanitize: bool) -> Path:
    flags = [*COMMON_FLAGS, *(ISA_FLAGS.get(source.stem, []) if _x86() else [])]
    if sanitize:
        flags += SANITIZE_FLAGS
    target = out / f"{source.stem}.o"
    done = subprocess.run([cxx, *flags, "-c", str(source), "-o", str(target)], capture_output=True, text=True)
    if done.returncode and source.stem in ISA_FLAGS and source.stem != "isa_generic":
        # A compiler too old for an instruction set: the unit then compiles to "not available".
        flags = [f for f in flags if not f.startswith("-m")]
        done = subprocess.run([cxx, *flags, "-c", str(source), "-o", str(target)], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{cxx} failed on {source.name}:\n{done.stderr[-4000:]}")
    return target


def build(force: bool = False, sanitize: bool = False) -> Path:
    """Compiles the library unless it is there already, and returns its path.

    Raises BuildError without a compiler or when compiling fails.
    """
    target = library_path(sanitize)
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
            objects = list(jobs.map(lambda s: _compile(cxx, s, out, sanitize), sources))
        # The name is taken in one step, so that nobody loads half a library.
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".tandem_cpu", delete=False) as part:
            pass
        link = [cxx, "-shared", *(SANITIZE_FLAGS if sanitize else []), *map(str, objects), "-o", part.name, "-lpthread"]
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
    parser.add_argument("--sanitize", action="store_true", help="AddressSanitizer and UBSan build, for tests")
    options = parser.parse_args(argv)
    try:
        print(build(options.force, options.sanitize))
    except BuildError as error:
        print(f"kernels.cpu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
