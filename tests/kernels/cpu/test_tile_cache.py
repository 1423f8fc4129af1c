"""The shared tile file: complete or absent, and never another model's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kernels import cpu
from kernels.cpu.tile_cache import Entry, open_tiles, write_tiles
from kernels.cpu.tiles import Kind, pack_float

pytestmark = pytest.mark.skipif(not cpu.available(), reason="CPU kernels are not built")
ENTRIES = [Entry("a", 20, 64, Kind.F32), Entry("b", 16, 32, Kind.BF16)]


def fill(buffers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    values = {entry.name: rng.standard_normal((entry.n, entry.k)).astype(np.float32) for entry in ENTRIES}
    for entry in ENTRIES:
        buffers[entry.name][:] = pack_float(values[entry.name], entry.kind).data
    return values


def test_written_tiles_come_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model.tiles"
    assert open_tiles(path, ENTRIES) is None
    with write_tiles(path, ENTRIES) as buffers:
        values = fill(buffers)
    found = open_tiles(path, ENTRIES)
    assert found is not None
    assert np.array_equal(found["a"].dequantize(), values["a"])
    assert not found["a"].data.flags.writeable
    assert found["a"].data.ctypes.data % 64 == 0


def test_other_weights_or_a_torn_file_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "model.tiles"
    with write_tiles(path, ENTRIES) as buffers:
        fill(buffers)
    assert open_tiles(path, ENTRIES[:1]) is None
    path.write_bytes(path.read_bytes()[:-1])
    assert open_tiles(path, ENTRIES) is None


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.tiles"
    with pytest.raises(RuntimeError, match="half"), write_tiles(path, ENTRIES):
        raise RuntimeError("half way")
    assert list(tmp_path.iterdir()) == []
