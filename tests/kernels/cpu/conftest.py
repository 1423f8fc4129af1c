"""Every test here runs once per instruction set that the machine has, and is skipped without the library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels import cpu

LEVELS = cpu.isa_levels() if cpu.available() else ["none"]


@pytest.fixture(params=LEVELS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Selects one instruction set for the test."""
    if not cpu.available():
        pytest.skip(f"CPU kernels: {cpu.reason()}")
    before = cpu.isa()
    cpu.select_isa(request.param)
    yield request.param
    cpu.select_isa(before)
