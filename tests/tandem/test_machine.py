"""Cores and memory by affinity and cgroup, read from fake trees."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tandem.machine import memory_limit, usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({f"{V2}/cpu.max": "max 100000"}, 8),
        ({f"{V2}/cpu.max": "200000 100000"}, 2),
        ({f"{V2}/cpu.max": "150000 100000"}, 2),
        ({f"{V2}/cpu.max": "10000 100000"}, 1),
        ({f"{V2}/cpu.max": "6400000 100000"}, 8),
        ({f"{V2}/cpu.max": "nonsense"}, 8),
        ({f"{V1}/cpu.cfs_quota_us": "300000", f"{V1}/cpu.cfs_period_us": "100000"}, 3),
        ({f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"}, 8),
        ({f"{V1},cpuacct/cpu.cfs_quota_us": "100000", f"{V1},cpuacct/cpu.cfs_period_us": "50000"}, 2),
        # The tightest group above counts, not only the process's own.
        (
            {
                "proc/self/cgroup": "0::/a/b",
                f"{V2}/a/b/cpu.max": "700000 100000",
                f"{V2}/a/cpu.max": "400000 100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n1:memory:/y",
                f"{V1}/x/cpu.cfs_quota_us": "500000",
                f"{V1}/x/cpu.cfs_period_us": "100000",
            },
            5,
        ),
        ({"proc/self/cgroup": "0::/../..", f"{V2}/cpu.max": "200000 100000"}, 2),
    ],
)
def test_cores(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert usable_cores(tree(tmp_path, files)) == cores


def test_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3}, raising=False)
    assert usable_cores(tree(tmp_path, {f"{V2}/cpu.max": "400000 100000"})) == 1


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({f"{V2}/memory.max": "1000000"}, 1_000_000),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000"}, 2_000_000),
        ({"proc/self/cgroup": "0::/a", f"{V2}/memory.max": "max", f"{V2}/a/memory.max": "3000000"}, 3_000_000),
        (
            {"proc/self/cgroup": "4:memory:/b", "sys/fs/cgroup/memory/b/memory.limit_in_bytes": "4000000"},
            4_000_000,
        ),
    ],
)
def test_memory(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    assert memory_limit(tree(tmp_path, files)) == limit


def test_memory_without_limit_is_the_machine(tmp_path: Path) -> None:
    files = {f"{V2}/memory.max": "max", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    assert memory_limit(tree(tmp_path, files)) == psutil.virtual_memory().total
