"""The dispatch table: every choice has a reason, and targets rule what they cannot run."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest

from kernels import dispatch, report
from kernels.dispatch import OPERATIONS, NoKernel, choose

triton_only = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(autouse=True)
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the compiled CPU kernels may compile them: not here."""
    monkeypatch.setattr(dispatch, "_cpu_kernels", lambda: (False, "not asked"))


@triton_only
def test_every_choice_explains_itself() -> None:
    places = [("cpu", None), ("interpreter", None), ("cuda", "sm_80"), ("cuda", "gfx942"), ("cuda", "none")]
    for device, target in places:
        rows = dispatch.table(device, target=target)
        assert len(rows) == sum(len(operation.dtypes) for operation in OPERATIONS.values())
        assert all(row.reason for row in rows)


def test_references_exist() -> None:
    for operation in OPERATIONS.values():
        module, _, name = operation.reference.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


@triton_only
def test_gpu_choices() -> None:
    assert choose("attention", "cuda", "bfloat16", target="sm_90").implementation == "triton"
    refused = choose("attention_fp8_kv", "cuda", "float8_e4m3", target="sm_80")
    assert refused.implementation is None and "A100" in refused.reason
    assert choose("attention_fp8_kv", "cuda", "float8_e4m3", target="gfx942").implementation == "triton"
    assert choose("linear", "cuda", "bfloat16", target="sm_90").implementation == "triton"
    assert choose("linear", "cuda", "bfloat16", target="sm_90", deterministic=False).implementation == "blas"
    assert "default tiles" in choose("sample", "cuda", "float32", target="sm_75").reason


def test_cpu_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_cpu_kernels", lambda: (True, ""))
    assert choose("quant_linear", "cpu", "Q4_1").implementation == "cpu"
    assert choose("quant_linear", "cpu", "awq").implementation == "reference"
    monkeypatch.setattr(dispatch, "_cpu_kernels", lambda: (False, "no compiler"))
    choice = choose("quant_linear", "cpu", "Q4_1")
    assert choice.implementation == "reference" and "no compiler" in choice.reason


def test_unknown_names_are_refused() -> None:
    for arguments in (("conv", "cpu", "float32"), ("linear", "cpu", "int4"), ("linear", "tpu", "float32")):
        with pytest.raises(NoKernel, match=r"(?s)'(conv|int4|tpu)'.*"):
            choose(*arguments)


def test_report_says_what_needs_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        report.check_kernels("cpu")
    text = report.render(report.list_kernels("cpu"))
    assert "attention" in text and "quant_linear" in text
