"""The GPU session runs through on the CPU with tiny shapes, and finds nothing wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_session.py"


@pytest.mark.timeout(900)
def test_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "session.json"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--dry-run", "--budget", "100000", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    results = json.loads(out.read_text())
    assert not results["errors"] and results["dry_run"]
    assert results["checks"] and all(check["passed"] for check in results["checks"])
    assert {speed["operation"] for speed in results["speeds"]} >= {"attention", "quant_linear", "linear", "rms_norm"}
    runs = results["models"]
    assert [(run["batch"], run["drafts"]) for run in runs] == [(1, 0), (1, 4), (2, 0), (2, 4)]
    assert all(run["captured_equals_eager"] for run in runs)
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("tiny") and "tok/s" in last


def test_without_a_gpu_it_says_so() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no GPU" in done.stderr
