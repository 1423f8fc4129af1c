"""Small commands, run as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tandem import __version__
from tandem.cli import admin
from tandem.cli.main import build_app


def tandem(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=110,
    )


def test_one_version_everywhere() -> None:
    from importlib.metadata import version

    assert tandem("--version").stdout == f"tandem {__version__}\n"
    assert version("tandem-llm") == __version__


def test_every_command_has_help() -> None:
    runner = CliRunner()
    listed = runner.invoke(build_app(None), ["--help"])
    assert listed.exit_code == 0
    names = [
        "serve",
        "gateway",
        "router",
        "engine",
        "draft",
        "chat",
        "models",
        "doctor",
        "config",
        "drain",
        "routes",
        "health",
        "kernels",
        "run-batch",
    ]
    for name in names:
        assert name in listed.output
        assert runner.invoke(build_app(name), [name, "--help"]).exit_code == 0, name


def test_doctor_checks_the_port_and_the_installation(free_port: int) -> None:
    done = tandem("doctor", "--port", str(free_port))
    for word in ("platform", "python", "disk", "memory", "port", "stubs", "kernels", "model"):
        assert f"    {word}: " in done.stdout or f"  {word}: " in done.stdout, done.stdout
    impossible = tandem("doctor", "--port", "70000")
    assert impossible.returncode == 2
    assert "FAIL  port: found 70000" in impossible.stdout


def test_a_model_that_cannot_be_found_is_one_line() -> None:
    done = tandem("models", "path", "./nothing-here.gguf")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "nothing-here.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_health_of_nobody_is_one_line_and_exit_1(free_port: int) -> None:
    for address in (f"127.0.0.1:{free_port}", f"http://127.0.0.1:{free_port}"):
        done = tandem("health", address)
        assert done.returncode == 1
        assert "does not serve" in done.stderr
    wrong = tandem("health", "nonsense")
    assert wrong.returncode == 2
    assert "neither host:port nor unix:/path" in wrong.stderr


def state(folder: Path, pid: int, url: str) -> None:
    folder.mkdir()
    child = {"name": "engine-0", "service": "engine", "address": f"unix:{folder}/engine-0.sock", "pid": 1}
    (folder / "state.json").write_text(json.dumps({"pid": pid, "url": url, "children": [child]}))


def test_the_stack_here_is_found_and_dead_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(admin, "Path", lambda _: tmp_path)
    with pytest.raises(typer.Exit):
        admin.the_stack()
    gone = subprocess.Popen(["true"])
    gone.wait()
    state(tmp_path / "tandem-a", gone.pid, "http://127.0.0.1:1")
    (tmp_path / "tandem-b").mkdir()
    (tmp_path / "tandem-b" / "state.json").write_text("{")
    with pytest.raises(typer.Exit):
        admin.the_stack()
    state(tmp_path / "tandem-c", os.getpid(), "http://127.0.0.1:2")
    assert admin.the_stack()["url"] == "http://127.0.0.1:2"
    assert admin.engine_address("engine-0") == f"unix:{tmp_path}/tandem-c/engine-0.sock"
    assert admin.engine_address("10.0.0.1:50051") == "10.0.0.1:50051"
    with pytest.raises(typer.Exit):
        admin.engine_address("engine-9")
    state(tmp_path / "tandem-d", os.getpid(), "http://127.0.0.1:3")
    with pytest.raises(typer.Exit):
        admin.the_stack()
    assert admin.the_stack("http://127.0.0.1:3")["url"] == "http://127.0.0.1:3"
