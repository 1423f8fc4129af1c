"""The log of traffic: what is written comes back, within its bounds, and whatever is wrong with a file is said."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tandem import traffic
from tandem.traffic import Entry, Header, TrafficError, TrafficLog

HEADER = Header("model", "tokenizer", 100)
ENTRY = Entry([1, 2, 3], [[4, 5], [6]], 0.8, 2**64 - 1)


def log_of(folder: Path, entries: list[Entry], max_bytes: int = 1 << 20) -> TrafficLog:
    under_test = TrafficLog(folder, HEADER, max_bytes)
    for entry in entries:
        under_test.offer(entry)
    under_test.close()
    return under_test


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(traffic.PATTERN))


def test_what_is_logged_comes_back(tmp_path: Path) -> None:
    long = Entry(list(range(100)) * 33, [[]], 0.0, 0)
    under_test = log_of(tmp_path / "t", [ENTRY, long])
    assert list(traffic.read(tmp_path / "t", HEADER)) == [ENTRY, long]
    assert (under_test.stats.written, under_test.stats.dropped) == (2, 0)
    log_of(tmp_path / "t", [ENTRY])
    assert list(traffic.read(tmp_path / "t")) == [ENTRY, long, ENTRY]


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    log_of(tmp_path / "t", [ENTRY])
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in files(tmp_path / "t")] == [0o600]


def test_the_oldest_files_make_room(tmp_path: Path) -> None:
    entries = [Entry([number % 100] * 100, [[1] * 100], 0.0, number) for number in range(600)]
    under_test = TrafficLog(tmp_path, HEADER, 64 << 10)
    for entry in entries:
        while under_test._queue.full():
            time.sleep(0.001)
        under_test.offer(entry)
    under_test.close()
    kept = list(traffic.read(tmp_path, HEADER))
    assert kept == entries[-len(kept) :]
    assert 32 << 10 < sum(path.stat().st_size for path in files(tmp_path)) <= 64 << 10
    assert len(files(tmp_path)) > 4 and under_test.stats.written == 600


def test_a_request_larger_than_a_file_is_dropped(tmp_path: Path) -> None:
    under_test = log_of(tmp_path, [Entry([1] * 5_000, [[1]], 0.0, 1), ENTRY], 64 << 10)
    assert (under_test.stats.written, under_test.stats.dropped) == (1, 1)
    assert list(traffic.read(tmp_path)) == [ENTRY]


def test_offering_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs: what is too much is dropped, and closing gives up."""
    hang = threading.Event()
    monkeypatch.setattr(TrafficLog, "_write", lambda self, line: hang.wait(10))
    under_test = TrafficLog(tmp_path, HEADER, 1 << 20)
    began = time.monotonic()
    for _ in range(2_000):
        under_test.offer(ENTRY)
    under_test.close(patience_s=0.2)
    assert time.monotonic() - began < 2
    assert under_test.stats.dropped >= 1_400
    hang.set()


def test_a_disk_that_fails_is_said_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "t"
    under_test = TrafficLog(folder, HEADER, 1 << 20)
    folder.rmdir()
    for _ in range(3):
        under_test.offer(ENTRY)
    while under_test.stats.dropped < 3:
        time.sleep(0.001)
    folder.mkdir()
    under_test.offer(ENTRY)
    under_test.close()
    assert caplog.text.count("traffic cannot be logged") == 1
    assert list(traffic.read(folder)) == [ENTRY]
    assert under_test.stats.written == 1


def test_a_directory_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(OSError, match="f"):
        TrafficLog(tmp_path / "f", HEADER, 1 << 20)


def test_what_a_killed_engine_left_half_written_is_left_out(tmp_path: Path) -> None:
    log_of(tmp_path, [ENTRY, ENTRY])
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    assert list(traffic.read(tmp_path, HEADER)) == [ENTRY]


LINE = json.loads(ENTRY.line())
BROKEN: dict[str, tuple[str, str]] = {
    "text": ("hello", "no JSON"),
    "list": ("[1]", "no object"),
    "no prompt": (json.dumps({**LINE, "prompt": []}), "prompt"),
    "prompt of text": (json.dumps({**LINE, "prompt": "abc"}), "prompt"),
    "id beyond the vocabulary": (json.dumps({**LINE, "outputs": [[100]]}), "outputs"),
    "negative id": (json.dumps({**LINE, "prompt": [-1]}), "prompt"),
    "id that is true": (json.dumps({**LINE, "prompt": [True]}), "prompt"),
    "no outputs": (json.dumps({**LINE, "outputs": []}), "outputs"),
    "temperature": (json.dumps({**LINE, "temperature": float("nan")}), "temperature"),
    "negative temperature": (json.dumps({**LINE, "temperature": -1}), "temperature"),
    "seed": (json.dumps({**LINE, "seed": 2**64}), "seed"),
    "bytes": ("\udcff\udcfe", "no JSON"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_lines_are_named(kind: str, tmp_path: Path) -> None:
    line, reason = BROKEN[kind]
    log_of(tmp_path, [ENTRY])
    (path,) = files(tmp_path)
    with path.open("ab") as file:
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(TrafficError, match=reason) as caught:
        list(traffic.read(tmp_path, HEADER))
    assert f"{path}, line 3" in str(caught.value)


def test_another_models_traffic_is_refused(tmp_path: Path) -> None:
    log_of(tmp_path, [ENTRY])
    with pytest.raises(TrafficError, match=r"line 1: model_digest is 'model', but the target's is 'other'"):
        list(traffic.read(tmp_path, Header("other", "tokenizer", 100)))
    with pytest.raises(TrafficError, match=r"has no files"):
        list(traffic.read(tmp_path / "nowhere"))
    (path,) = files(tmp_path)
    path.write_text('{"format": "something else"}\n')
    with pytest.raises(TrafficError, match="something else"):
        list(traffic.read(tmp_path))
