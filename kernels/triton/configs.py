"""Tile configurations per target: shipped as JSON beside this module, found by target, kernel and variant.

`configs/<target>.json` maps "kernel/variant" to a tile; `configs/default.json` serves targets without a file of their own
and kernels that a target's file leaves out. The default tiles fit the smallest shared memory of any target (64 KiB).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration: tile sizes in elements, warps per program, software-pipelining stages."""

    block_m: int = 16
    block_n: int = 64
    block_k: int = 64
    warps: int = 4
    stages: int = 2


class ConfigError(ValueError):
    """A tile configuration file is malformed or lacks an entry."""


@cache
def _table(name: str) -> dict[str, Tile]:
    path = resources.files("kernels.triton") / "configs" / f"{name}.json"
    if not path.is_file():
        return {}
    try:
        entries = json.loads(path.read_text())
        return {key: Tile(**value) for key, value in entries["tiles"].items()}
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"tile configuration {name}.json: {error}") from error


def names() -> tuple[str, ...]:
    """Targets that have a file of their own."""
    folder = resources.files("kernels.triton") / "configs"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json")))


def tile(target: str | None, kernel: str, variant: str) -> Tile:
    """The tile for `kernel` and `variant` on `target` (None or an unknown name: the default).

    Raises ConfigError when neither the target's file nor the default has the entry.
    """
    key = f"{kernel}/{variant}"
    for name in (target, "default"):
        if name is not None and key in _table(name):
            return _table(name)[key]
    raise ConfigError(f"no tile configuration for {key!r}; known: {', '.join(sorted(_table('default')))}")


@cache
def current_target(device_index: int = 0) -> str:
    """Name of the target of the current device; "interpreter" without one."""
    from kernels.triton.targets import target_of_device

    target = target_of_device(device_index)
    return target.name if target is not None else "interpreter"
