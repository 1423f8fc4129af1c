"""The generic level on aarch64: compiled by a cross compiler, run under emulation, the same bits as here."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kernels import cpu
from kernels.cpu.build import COMMON_FLAGS, SOURCE_DIR
from kernels.cpu.tiles import Kind
from tests.kernels.cpu.helpers import library, random_weight, run_linear

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CXX = "aarch64-linux-gnu-g++"
DRIVER = Path(__file__).with_name("emulated_driver.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the driver under emulation."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not cpu.available() or not shutil.which(CXX) or emulator is None:
        pytest.skip(f"needs the CPU kernels, {CXX} and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user-static)")
    out = tmp_path_factory.mktemp("aarch64")

    def compiled(source: Path) -> str:
        target = out / f"{source.stem}.o"
        command = [CXX, *COMMON_FLAGS, "-Werror", f"-I{SOURCE_DIR}", "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return str(target)

    with ThreadPoolExecutor(2) as jobs:
        objects = list(jobs.map(compiled, [*sorted(SOURCE_DIR.glob("*.cpp")), DRIVER]))
    subprocess.run([CXX, "-static", *objects, "-o", str(out / "driver"), "-pthread"], check=True)
    return [emulator, str(out / "driver")]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.BF16, Kind.Q4_1, Kind.Q8_0, Kind.Q6_K], ids=lambda kind: kind.name)
def test_generic_level_gives_the_same_bits(program: list[str], kind: Kind, tmp_path: Path) -> None:
    rng = np.random.default_rng(21)
    n, k, rows = 41, 128, 5
    weight = random_weight(rng, kind, n, k)
    x = rng.standard_normal((rows, k)).astype(np.float32)
    tiles = np.ascontiguousarray(weight.data)
    head = np.asarray([int(kind), n, k, rows, tiles.nbytes], "<i8")
    (tmp_path / "in").write_bytes(head.tobytes() + tiles.tobytes() + x.tobytes())
    subprocess.run([*program, "generic", str(tmp_path / "in"), str(tmp_path / "out")], check=True)
    found = np.frombuffer((tmp_path / "out").read_bytes(), "<f4")

    before = cpu.isa()
    cpu.select_isa("generic")
    try:
        out, _ = run_linear(weight, x)
        normed, gated = np.empty_like(x), x.copy()
        for row in range(rows):
            library().td_rmsnorm(x[row].ctypes.data, x.ctypes.data, 1e-5, k, normed[row].ctypes.data)
            library().td_gated(gated[row].ctypes.data, x[row].ctypes.data, k, 0)
    finally:
        cpu.select_isa(before)
    assert np.isfinite(found).all()
    assert np.array_equal(found, np.concatenate([out.ravel(), normed.ravel(), gated.ravel()]))
