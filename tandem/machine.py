"""What this process may use of the machine: cores by affinity, cgroup quota and NUMA node, memory by cgroup limit.

No torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Threads that can compute at the same time: the affinity mask, and the tightest CPU quota of a cgroup above.

    A quota is rounded up, so that none of it is lost. root: where /proc and /sys are read, for tests.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quotas = [quota for folder in _groups(root, "cpu") if (quota := _quota(folder)) is not None]
    return max(1, min([cores, *(int(-(-quota // 1)) for quota in quotas)]))


def numa_nodes(threads: int, root: Path = _ROOT) -> dict[int, set[int]]:
    """Cores by NUMA node, for each node with as many cores within the affinity mask as there are threads.

    Empty where the mask lies within one node, or the system does not tell: there is nothing to choose then.
    """
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:
        return {}
    nodes: dict[int, set[int]] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if cores := _cores(_read(folder / "cpulist")) & allowed:
            nodes[int(folder.name.removeprefix("node"))] = cores
    if len(nodes) < 2:
        return {}
    return {node: cores for node, cores in sorted(nodes.items()) if len(cores) >= threads}


def keep_to_node(threads: int, node: int = -1, root: Path = _ROOT) -> int | None:
    """Keeps all threads of this process to the cores of one NUMA node, if `threads` of them fit; returns its number.

    Memory that they touch first from now on is that node's. node: -1 takes the one with the most free memory. None,
    and nothing is changed, where numa_nodes finds none.

    Raises:
        ValueError: the machine has nodes to choose from, but not this one.
    """
    nodes = numa_nodes(threads, root)
    if not nodes:
        return None
    if node < 0:
        node = max(nodes, key=lambda name: (_free_memory(root, name), -name))
    if node not in nodes:
        raise ValueError(f"numa_node is {node}, but {threads} threads fit only {', '.join(map(str, nodes))}")
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task.name), nodes[node])
    return node


def _cores(text: str) -> set[int]:
    """Numbers of a list such as 0-3,8,10-11."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last if last.isdigit() else first) + 1))
    return found


def _free_memory(root: Path, node: int) -> int:
    """Free memory of a node in KiB; 0 where the system does not tell."""
    for line in _read(root / f"sys/devices/system/node/node{node}/meminfo").splitlines():
        words = line.split()
        if len(words) > 3 and words[2] == "MemFree:" and words[3].isdigit():
            return int(words[3])
    return 0


def memory_limit(root: Path = _ROOT) -> int:
    """Bytes that this process may use: the machine's memory, or the tightest limit of a cgroup above."""
    limits = [psutil.virtual_memory().total]
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            # "max" and v1's near-endless default are no limits.
            if text.isdigit() and int(text) > 0:
                limits.append(int(text))
    return min(limits)


def _quota(folder: Path) -> float | None:
    """Cores that a cgroup folder grants: cpu.max is "quota period" (v2), v1 has two files and -1 for none."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0 or int(words[0]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of all above it, in v2's tree and in the v1 tree of a controller.

    The roots come even where /proc names no group: in a container with its own cgroup namespace they are its limits.
    """
    base = root / "sys/fs/cgroup"
    paths = {"": "/", controller: "/"}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == "":
            paths[""] = path
        elif controller in names.split(","):
            paths[controller] = path
    trees = [(base, paths[""]), (base / "unified", paths[""])]
    trees += [(base / name, paths[controller]) for name in (controller, f"{controller},{controller}acct")]
    for tree, path in trees:
        # A path with .. lies outside what is mounted here.
        inner = PurePosixPath(path.lstrip("/"))
        if ".." in inner.parts:
            inner = PurePosixPath()
        yield from (tree / part for part in (inner, *inner.parents) if str(part) != ".")
        yield tree


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
