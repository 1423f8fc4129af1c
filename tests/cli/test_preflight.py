from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem.cli import preflight

SCRIPT = str(Path(preflight.__file__))
SETUP = Path(__file__).resolve().parents[2] / "deploy" / "setup"


def test_a_taken_port_is_one_line_with_a_free_one_to_take(free_port: int) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port))
        holder.listen()
        done = subprocess.run(
            [sys.executable, "-I", SCRIPT, "--installed", "--port", str(free_port)], capture_output=True, text=True
        )
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert f"127.0.0.1:{free_port} taken" in done.stderr
    assert "make serve PORT=" in done.stderr


def test_a_good_machine_is_silent(free_port: int) -> None:
    done = subprocess.run(
        [sys.executable, "-I", SCRIPT, "--installed", "--port", str(free_port)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("port", [0, 70000])
def test_impossible_ports_are_refused(port: int) -> None:
    assert not preflight.check_port(port).ok


def test_too_little_of_anything_is_told_with_both_numbers(tmp_path: Path) -> None:
    disk = preflight.check_disk(tmp_path / "not" / "there", 10**18)
    assert not disk.ok
    assert "GiB free at" in disk.line()
    assert "needed 931322574.6 GiB" in disk.line()
    memory = preflight.check_memory(10**18)
    assert not memory.ok
    assert "needed" in memory.line()
    assert "mend" in memory.line()


def test_the_index_that_pip_uses_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/simple/wheel/" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = http://user:hush@127.0.0.1:{free_port}/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    for name in ("PIP_INDEX_URL", "PIP_NO_INDEX", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    missing = preflight.check_index()
    assert not missing.ok
    assert "does not answer" in missing.line()
    assert "hush" not in missing.line()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        config.write_text(f"[global]\nindex-url = http://127.0.0.1:{free_port}/simple\n")
        assert preflight.check_index().ok
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port}/wrong")
        assert "HTTP 404" in preflight.check_index().line()
    finally:
        server.shutdown()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert preflight.check_index().ok


def test_find_python_skips_names_that_lead_nowhere(tmp_path: Path) -> None:
    shim = tmp_path / "python3.13"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    good = tmp_path / "python3.11"
    good.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    good.chmod(0o755)
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    for tool in ("sh", "uname"):
        (tmp_path / tool).symlink_to(f"/bin/{tool}" if os.path.exists(f"/bin/{tool}") else f"/usr/bin/{tool}")
    script = ["/bin/sh", str(SETUP / "find-python.sh")]
    found = subprocess.run(script, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).exists()
    good.unlink()
    none = subprocess.run(script, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert none.returncode == 2
    assert none.stderr.startswith("python: found python3 is 3.9; needed 3.11 to 3.14; mend: ")
