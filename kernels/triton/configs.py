"""Tile configurations per target: shipped as JSON beside this module, found by target, kernel and variant.

`configs/<target>.json` maps "kernel/variant" to a tile; `configs/default.json` serves targets without a file of their
own and kernels that a target's file leaves out. The default tiles fit the smallest shared memory of any target (64
KiB).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import torch

from kernels.triton.targets import TARGETS, target_of_device


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


def cache_file(target: str) -> Path:
    """Where tiles that were tuned on this machine lie; they come before the shipped ones."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem" / "tiles" / f"{target}.json"


@cache
def _table(name: str) -> dict[str, Tile]:
    shipped = resources.files("kernels.triton") / "configs" / f"{name}.json"
    found: dict[str, Tile] = {}
    for path in (shipped, cache_file(name)):
        try:
            if path.is_file():
                entries = json.loads(path.read_text())
                found |= {key: Tile(**value) for key, value in entries["tiles"].items()}
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"tile configuration {path}: {error}") from error
    return found


def save_tiles(target: str, tiles: dict[str, Tile]) -> Path:
    """Adds tiles to this machine's cache of a target, and makes them take effect. Returns the file."""
    path = cache_file(target)
    known = json.loads(path.read_text())["tiles"] if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    known |= {key: asdict(value) for key, value in tiles.items()}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"tiles": known}, indent=1))
    temporary.replace(path)
    _table.cache_clear()
    return path


def names() -> tuple[str, ...]:
    """Targets that have a file of their own."""
    folder = resources.files("kernels.triton") / "configs"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json")))


def digest(target: str) -> str:
    """Eight hex digits of the tiles in use for a target: with other tiles a row may have other bits."""
    tiles = _table("default") | _table(target)
    text = json.dumps({key: asdict(tiles[key]) for key in sorted(tiles)})
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def tile(target: str | None, kernel: str, variant: str) -> Tile:
    """The tile for `kernel` and `variant` on `target` (None or an unknown name: the default).

    Raises ConfigError when neither the target's file nor the default has the entry.
    """
    key = f"{kernel}/{variant}"
    for name in (target, "default"):
        if name is not None and key in _table(name):
            return _table(name)[key]
    raise ConfigError(f"no tile configuration for {key!r}; known: {', '.join(sorted(_table('default')))}")


# Set while kernels are compiled for a target that is not the machine's.
_override: ContextVar[str | None] = ContextVar("kernel_target", default=None)


@contextmanager
def for_target(name: str) -> Iterator[None]:
    """Inside, tiles and limits are those of target `name`."""
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def current_target() -> str:
    """Name of the target in use: the current device's; "interpreter" without a device that is known."""
    return _override.get() or _device_target()


@cache
def _device_target() -> str:
    target = target_of_device()
    return target.name if target is not None else "interpreter"


def check_fp8(dtype: torch.dtype) -> None:
    """Raises ValueError unless the target in use has an e4m3 with the bits of `dtype`.

    The interpreter takes every form.
    """
    name = current_target()
    target = TARGETS.get(name)
    if target is None:
        return
    if target.fp8 is None:
        raise ValueError(f"{name} ({target.examples}) has no fp8 arithmetic: use bf16 or fp16, or int8 weights")
    if dtype != getattr(torch, target.torch_fp8):
        raise ValueError(f"{dtype} is not the fp8 form of {name}; that is torch.{target.torch_fp8}")
