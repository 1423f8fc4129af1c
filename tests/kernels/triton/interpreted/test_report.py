"""The checks that run on a GPU, run in the interpreter; and that they can fail."""

from __future__ import annotations

import pytest
import torch

from kernels import report
from kernels.triton import checks


@pytest.mark.slow
def test_every_check_passes() -> None:
    found = report.check_kernels(seed=5)
    assert not [check for check in found if not check.passed], report.render(found)
    assert {check.operation for check in found} >= {"attention decode", "rope_write_kv", "quant_linear", "sample"}
    assert "ok" in report.render(found)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.norm, "rms_norm", lambda x, *rest: rest[-1].copy_(x))
    wrong = [check for check in checks._check_rows(torch.device("cpu")) if check.operation == "rms_norm"]
    assert wrong and not any(check.passed for check in wrong)
    # A kernel that leaves its output poisoned is found too.
    monkeypatch.setattr(checks.norm, "rms_norm", lambda x, *rest: rest[-1])
    assert not any(c.passed for c in checks._check_rows(torch.device("cpu")) if c.operation == "rms_norm")


def test_speed_needs_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="no GPU"):
        report.bench_kernels("interpreter")
