"""These tests run kernels in Triton's interpreter, which must be chosen before triton is imported.

Without TRITON_INTERPRET=1 nothing here is collected; tests/kernels/triton/test_interpreted.py runs the folder in a
process of its own. By hand: TRITON_INTERPRET=1 pytest tests/kernels/triton/interpreted
"""

from __future__ import annotations

import os

import pytest
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Inputs are drawn from a fixed seed; one thread, as tests share the machine."""
    torch.manual_seed(1234)
    torch.set_num_threads(1)
