"""Compilation for GPUs that are not there, in a process without the interpreter: a named set per run, the rest when
slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def compile_set(name: str, tmp_path: Path, target: str | None = None) -> list[dict[str, object]]:
    """Compiles a set and returns its results; prints registers, shared memory and spills."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "kernels.triton.aot", "--set", name, "--json", str(results)]
    if target is not None:
        command += ["--target", target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert results.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(results.read_text())


def check(results: list[dict[str, object]]) -> None:
    failed = [result for result in results if result["error"]]
    assert not failed, failed[0]
    too_large = [result for result in results if result["shared"] > result["shared_limit"]]
    assert not too_large, too_large


@pytest.mark.timeout(900)
def test_default_set(tmp_path: Path) -> None:
    results = compile_set("default", tmp_path)
    check(results)
    assert {result["target"] for result in results} == {
        "sm_80",
        "sm_86",
        "sm_89",
        "sm_90",
        "sm_120",
        "sm_121",
        "gfx942",
    }
    assert {"paged_attention_kernel", "quant_linear_kernel", "sample_kernel", "rope_write_kernel"} <= {
        result["kernel"] for result in results
    }
    assert any(result["registers"] for result in results)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120", "sm_121", "gfx942"])
def test_all_cases(target: str, tmp_path: Path) -> None:
    check(compile_set("all", tmp_path, target))


def run_without_interpreter(code: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_fp8_follows_the_target() -> None:
    """fp8 KV is refused on sm_80 by name, and is e4m3fnuz on gfx942; the recorded types say so."""
    out = run_without_interpreter(
        """
from functools import partial
from kernels.triton import aot, aot_cases
from kernels.triton.configs import for_target
from kernels.triton.targets import TARGETS
for name in ("sm_80", "sm_86", "sm_90", "gfx942"):
    case = partial(aot_cases.attention, head_dim=128, mode="decode", fp8=True)
    try:
        with for_target(name), aot.recorded() as launches:
            case(TARGETS[name])
        print(name, launches[0].signature["k_cache"])
    except ValueError as error:
        print(name, "refused:", error)
with for_target("gfx942"):
    try:
        aot_cases.rope_write(TARGETS["sm_90"], fp8=True, interleaved=False)
    except ValueError as error:
        print("wrong form:", error)
"""
    )
    lines = out.splitlines()
    assert lines[0].startswith("sm_80 refused:") and "A100" in lines[0]
    assert lines[1].startswith("sm_86 refused:")
    assert lines[2:4] == ["sm_90 *fp8e4nv", "gfx942 *fp8e4b8"]
    assert lines[4].startswith("wrong form:") and "float8_e4m3fnuz" in lines[4]


def test_a_configuration_beyond_shared_memory_is_found(tmp_path: Path) -> None:
    """The limit is checked for real: a tile that fits sm_90 does not fit sm_86."""
    out = run_without_interpreter(
        """
import torch
from kernels.triton import aot, linear
from kernels.triton.configs import Tile
from kernels.triton.targets import TARGETS
with aot.recorded() as launches:
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    linear.linear(x, torch.empty(28672, 4096, dtype=torch.bfloat16, device="meta"), config=Tile(128, 128, 64, 8, 5))
for name in ("sm_90", "sm_86"):
    print(aot.compile_launch(launches[0], TARGETS[name]).fits)
"""
    )
    assert out.split() == ["True", "False"]
