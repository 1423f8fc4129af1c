"""Runs a black-box pytest suite of OpenAI's API against a freshly started stack: conformance.py FOLDER [pytest args].

The suite gets BASE_URL and API_KEY. It is run from a copy, so that nothing is written beside it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

READY_S = 300.0
INI = "[pytest]\naddopts = -q -p no:cacheprovider\nasyncio_default_fixture_loop_scope = function\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(port: int) -> subprocess.Popen[str]:
    """Starts `tandem serve` and returns once it says that it is ready. Raises SystemExit if it does not."""
    command = [sys.executable, "-m", "tandem.cli", "serve", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if "Ctrl-C" in line:
                ready.set()

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + READY_S
    while not ready.wait(0.2):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit("the stack did not become ready; see above")
    return process


def main() -> int:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    port = free_port()
    process = start(port)
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "suite"
        shutil.copytree(sys.argv[1], suite)
        suite.chmod(0o755)
        (suite / "pytest.ini").write_text(INI)
        environment = {**os.environ, "BASE_URL": f"http://127.0.0.1:{port}/v1", "API_KEY": "sk-none"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", str(suite), *sys.argv[2:]], cwd=suite, env=environment
            )
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
