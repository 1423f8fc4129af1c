"""The launcher's promises about processes, on stand-in services."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

LAUNCHER = str(Path(__file__).with_name("fake_launcher.py"))


class Running:
    """A launcher process with its output."""

    def __init__(self, run_dir: Path, port: int, behaviour: str, limit_s: float = 60.0) -> None:
        self.run_dir = run_dir
        self.errors = run_dir.with_name(run_dir.name + ".err")
        self.process = subprocess.Popen(
            [sys.executable, LAUNCHER, str(run_dir), str(port), behaviour, str(limit_s)],
            stdout=subprocess.PIPE,
            stderr=self.errors.open("wb"),
            text=True,
        )

    def pids(self) -> list[int]:
        """Waits until the launcher says that it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), line + self.error_text()
        return [int(word) for word in line.split()[1:]]

    def error_text(self) -> str:
        return self.errors.read_text()


@pytest.fixture
def running(short_dir: Path, free_port: int) -> Iterator[object]:
    started: list[Running] = []

    def start(behaviour: str, limit_s: float = 60.0) -> Running:
        run_dir = short_dir / f"run{len(started)}"
        run_dir.mkdir()
        started.append(Running(run_dir, free_port, behaviour, limit_s))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def gone(pids: list[int], within_s: float) -> list[int]:
    """The pids that still run after at most `within_s` seconds."""
    deadline = time.monotonic() + within_s
    left = pids
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_everything(running, number: signal.Signals) -> None:
    launcher = running("good")
    pids = launcher.pids()
    launcher.process.send_signal(number)
    assert launcher.process.wait(timeout=10) == 0
    assert gone(pids, 0.5) == []
    assert not launcher.run_dir.exists()


def test_ctrl_c_kills_deaf_children_within_ten_seconds(running) -> None:
    launcher = running("deaf")
    pids = launcher.pids()
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(timeout=10) == 0
    assert gone(pids, 0.5) == []
    assert "so killed" in launcher.error_text()


def test_kill_nine_leaves_nothing(running) -> None:
    launcher = running("parent")
    pids = launcher.pids()
    match = re.search(r"grandchild (\d+)", launcher.error_text())
    assert match
    pids.append(int(match[1]))
    launcher.process.kill()
    assert gone(pids, 10) == []
    deadline = time.monotonic() + 5
    while launcher.run_dir.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not launcher.run_dir.exists()


def test_child_that_never_was_ready_ends_the_launcher_with_its_error(running) -> None:
    launcher = running("never")
    assert launcher.process.wait(timeout=30) == 1
    text = launcher.error_text()
    assert "engine-0 ended with exit code 3 before it was ready" in text
    assert "no model here: cannot start" in text


def test_child_that_is_never_ready_in_time_ends_the_launcher(running) -> None:
    launcher = running("good", 0.05)
    assert launcher.process.wait(timeout=30) == 1
    assert "not ready after" in launcher.error_text()


def test_crashed_child_comes_back(running) -> None:
    launcher = running("good")
    pids = launcher.pids()
    os.kill(pids[2], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while "engine-0 is back" not in launcher.error_text():
        assert time.monotonic() < deadline, launcher.error_text()
        time.sleep(0.05)
    assert "ended with signal SIGKILL; restarting" in launcher.error_text()
    assert gone([pids[0]], 0) == [pids[0]]


@pytest.mark.slow
def test_five_crashes_are_given_up_and_shown_and_the_rest_goes_on(running) -> None:
    launcher = running("dies")
    pids = launcher.pids()
    deadline = time.monotonic() + 60
    while "given up" not in launcher.error_text():
        assert time.monotonic() < deadline, launcher.error_text()
        time.sleep(0.1)
    assert "crashed 5 times" in launcher.error_text()
    assert "something broke" in launcher.error_text()
    assert launcher.error_text().count("restarting in") == 4
    assert launcher.process.poll() is None
    assert gone(pids[:2], 0) == pids[:2]
    with contextlib.suppress(ProcessLookupError):
        launcher.process.send_signal(signal.SIGINT)
    assert launcher.process.wait(timeout=10) == 0
