"""Starts the real stack as a user would and looks after it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

READY_S = 300.0


class Stack:
    """`tandem serve` in a process of its own."""

    def __init__(self, folder: Path, port: int, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        # Made by the launcher, which also removes it.
        self.run_dir = folder / "run"
        self.log_path = folder / "serve.log"
        self.output = ""
        command = [sys.executable, "-m", "tandem.cli", "serve", "--port", str(port), "--run-dir", str(self.run_dir)]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=self.log_path.open("wb"),
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )

    def wait_ready(self) -> Stack:
        """Returns once the table and the curl are printed. Raises AssertionError with the log if they are not."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + READY_S
        done = threading.Event()

        def read() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.output += line
                if "Ctrl-C" in line:
                    done.set()
            done.set()

        threading.Thread(target=read, daemon=True).start()
        while not done.wait(0.1):
            assert time.monotonic() < deadline, f"not ready after {READY_S} s:\n{self.log()}"
        assert "Ctrl-C" in self.output, f"ended before it was ready:\n{self.log()}"
        return self

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-6000:]

    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "state.json").read_text()))

    def address(self, name: str) -> str:
        return str(next(child["address"] for child in self.state()["children"] if child["name"] == name))

    def pids(self, service: str) -> list[int]:
        """Processes of a service now, found by their command line, so that restarted ones count."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if "tandem.launcher.guard" in words and service in words:
                    found.append(child.pid)
        return sorted(found)

    def pid(self, name: str) -> int:
        """The process of one child, by the socket that it serves on."""
        address = self.address(name)
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if f"--listen={address}" in child.cmdline():
                    return int(child.pid)
        raise AssertionError(f"{name} does not run:\n{self.log()}")

    def everything(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=110)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def eventually(check: Any, within_s: float = 30.0, what: str = "") -> Any:
    """The first truthy value of check(), asked again and again."""
    deadline = time.monotonic() + within_s
    while True:
        value = check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {within_s} s: {what or check}"
        time.sleep(0.1)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run (a pid that was given to another process does not count)."""
    left = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left
