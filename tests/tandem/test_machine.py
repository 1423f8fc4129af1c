"""Cores and memory by affinity and cgroup, read from fake trees."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tandem.machine import keep_to_node, memory_limit, numa_nodes, usable_cores


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


NODE = "sys/devices/system/node"
TWO = {
    f"{NODE}/node0/cpulist": "0-2,9",
    f"{NODE}/node0/meminfo": "Node 0 MemTotal: 900 kB\nNode 0 MemFree: 100 kB",
    f"{NODE}/node1/cpulist": "3-7",
    f"{NODE}/node1/meminfo": "Node 1 MemTotal: 900 kB\nNode 1 MemFree: 300 kB",
    f"{NODE}/online": "0-1",
}


@pytest.mark.parametrize(
    ("threads", "nodes"), [(1, {0: {0, 1, 2}, 1: {3, 4, 5, 6, 7}}), (4, {1: {3, 4, 5, 6, 7}}), (6, {})]
)
def test_nodes_that_hold_the_threads(tmp_path: Path, threads: int, nodes: dict[int, set[int]]) -> None:
    """Core 9 is outside the affinity mask."""
    assert numa_nodes(threads, tree(tmp_path, TWO)) == nodes


def test_one_node_leaves_nothing_to_choose(tmp_path: Path) -> None:
    assert numa_nodes(1, tree(tmp_path / "one", {f"{NODE}/node0/cpulist": "0-7"})) == {}
    assert numa_nodes(1, tree(tmp_path / "memory", {f"{NODE}/node0/cpulist": "0-7", f"{NODE}/node1/cpulist": ""})) == {}
    assert numa_nodes(1, tmp_path / "nothing") == {}


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """Cores by thread, as they are set."""
    found: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", found.__setitem__, raising=False)
    return found


def test_all_threads_keep_to_the_node_with_most_memory(tmp_path: Path, pinned: dict[int, set[int]]) -> None:
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(threading.get_native_id).result()
        assert keep_to_node(2, root=tree(tmp_path, TWO)) == 1
    assert {os.getpid(), other} <= set(pinned) and all(cores == {3, 4, 5, 6, 7} for cores in pinned.values())


def test_a_named_node_is_taken_or_refused(tmp_path: Path, pinned: dict[int, set[int]]) -> None:
    root = tree(tmp_path, TWO)
    assert keep_to_node(2, 0, root) == 0 and pinned[os.getpid()] == {0, 1, 2}
    pinned.clear()
    with pytest.raises(ValueError, match="numa_node is 0, but 4 threads fit only 1"):
        keep_to_node(4, 0, root)
    assert keep_to_node(6, 0, root) is None and keep_to_node(1, 3, tmp_path / "nothing") is None and not pinned
