"""The systemd units: against the services' flags, against systemd's own checks, and what the command writes."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tandem.cli import systemd
from tandem.cli.services import SERVICES
from tandem.cli.units import HEADER, Plan, units
from tandem.rpc import check_address
from tandem.settings import env_name, load_settings

ROOT = Path(__file__).resolve().parents[2]
ANALYZE = shutil.which("systemd-analyze")
PROGRAM = str(Path(sys.executable).parent / "tandem")
SERVICE_UNITS = ("gateway", "router", "engine@", "draft@")


def settings_of(text: str) -> dict[str, list[str]]:
    """All values per key of a unit, over its sections (no key is in two of them)."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def app() -> typer.Typer:
    made = typer.Typer()
    systemd.register(made)
    return made


def test_the_shipped_units_are_what_the_command_writes() -> None:
    folder = ROOT / "deploy/systemd"
    made = units(Plan("/opt/tandem/bin/tandem"))
    assert {path.name for path in folder.iterdir()} == set(made)
    for name, text in made.items():
        assert (folder / name).read_text() == text, f"write deploy/systemd/{name} anew"


@pytest.mark.parametrize("user", [False, True])
@pytest.mark.parametrize("name", SERVICE_UNITS)
def test_services_accept_their_command_lines(name: str, user: bool) -> None:
    text = units(Plan(PROGRAM, engines=2, port=9000, user=user))[f"tandem-{name}.service"]
    (command,) = settings_of(text)["ExecStart"]
    command = command.replace("%t", "/run").replace("%i", "1")
    program, service, *words = command.split()
    assert program == PROGRAM and service == name.removesuffix("@")
    flags = {word[2:].replace("-", "_"): value for word, value in zip(words[::2], words[1::2], strict=True)}
    loaded, _ = load_settings(SERVICES[service].settings(), flags=flags, env={})
    for address in (getattr(loaded, "listen", ""), getattr(loaded, "draft", ""), getattr(loaded, "router", "")):
        assert not address or check_address(address) == address


def test_router_and_target_know_every_engine_and_engines_their_draft() -> None:
    made = units(Plan(PROGRAM, engines=2))
    router = settings_of(made["tandem-router.service"])["ExecStart"][0]
    listen = re.search(r"--listen (\S+)", settings_of(made["tandem-engine@.service"])["ExecStart"][0])
    assert listen is not None
    assert router.endswith("--engines " + ",".join(listen[1].replace("%i", str(index)) for index in (0, 1)))
    wants = settings_of(made["tandem.target"])["Wants"][0].split()
    assert {"tandem-engine@0.service", "tandem-engine@1.service", "tandem-router.service"} <= set(wants)
    engine = settings_of(made["tandem-engine@.service"])
    draft = re.search(r"--listen (\S+)", settings_of(made["tandem-draft@.service"])["ExecStart"][0])
    assert draft is not None and f"--draft {draft[1]}" in engine["ExecStart"][0]
    assert "tandem-draft@%i.service" in engine["Wants"] and "tandem-draft@%i.service" in engine["After"][0]


@pytest.mark.parametrize("name", SERVICE_UNITS)
def test_units_restart_stop_in_time_and_log_with_their_name(name: str) -> None:
    text = units(Plan(PROGRAM))[f"tandem-{name}.service"]
    service = name.removesuffix("@")
    got = settings_of(text)
    assert got["Restart"] == ["on-failure"] and got["RestartPreventExitStatus"] == ["2"]
    grace = {"gateway": "grace", "router": "drain_grace_s", "engine": "grace"}.get(service)
    default = SERVICES[service].settings().model_fields[grace].default if grace else 0
    assert float(got["TimeoutStopSec"][0]) >= default + 10
    assert got["SyslogIdentifier"] == [f"tandem-{service}"]
    assert got["LogExtraFields"] == [f"TANDEM_SERVICE={service}"]
    for variable in re.findall(r"(TANDEM_\w+)=", " ".join(got["Environment"])):
        assert variable == "TANDEM_CACHE_DIR" or variable in map(env_name, SERVICES[service].settings().model_fields)
    assert "MemoryMax" in got and got["NoNewPrivileges"] == ["yes"]


def test_sections_hold_no_key_twice_that_may_stand_once() -> None:
    for name, text in units(Plan(PROGRAM)).items():
        many = {"Environment", "EnvironmentFile", "DeviceAllow", "Wants"}
        lines = [line for line in text.splitlines() if line.partition("=")[0] not in many]
        parser = configparser.ConfigParser(strict=True, interpolation=None, allow_no_value=True)
        parser.optionxform = str  # type: ignore[method-assign, assignment]
        parser.read_string("\n".join(lines))
        assert parser.sections(), name


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("user", [False, True])
def test_systemd_finds_nothing_to_say(user: bool, tmp_path: Path) -> None:
    for name, text in units(Plan("/bin/true", engines=1, user=user)).items():
        (tmp_path / name).write_text(text)
    names = ["tandem.target", "tandem-gateway.service", "tandem-router.service", "tandem-health.service"]
    names += ["tandem-health.timer", "tandem-engine@0.service", "tandem-draft@0.service"]
    for template in ("engine", "draft"):
        shutil.copy(tmp_path / f"tandem-{template}@.service", tmp_path / f"tandem-{template}@0.service")
    runtime = tmp_path / "run"
    runtime.mkdir(0o700)
    done = subprocess.run(
        [str(ANALYZE), *(["--user"] if user else []), "verify", "--man=no", *(str(tmp_path / name) for name in names)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )
    ours = [line for line in done.stderr.splitlines() if "tandem" in line]
    assert done.returncode == 0 and ours == [], done.stderr


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize(("name", "limit"), [("gateway", 2.0), ("router", 2.0), ("engine@", 2.2), ("draft@", 1.2)])
def test_exposure_stays_low(name: str, limit: float, tmp_path: Path) -> None:
    path = tmp_path / f"tandem-{name}.service"
    path.write_text(units(Plan("/bin/true"))[path.name])
    command = [str(ANALYZE), "security", "--offline=true", "--no-pager", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout + done.stderr)
    assert level is not None, done.stderr
    assert float(level[1]) <= limit


def test_install_writes_once_and_uninstall_takes_only_what_is_ours(tmp_path: Path) -> None:
    run = CliRunner()
    command = ["systemd", "install", "--directory", str(tmp_path), "--program", PROGRAM, "--engines", "2"]
    first = run.invoke(app(), command)
    assert first.exit_code == 0 and "daemon-reload" in first.output, first.output
    assert {path.name for path in tmp_path.iterdir()} == set(units(Plan(PROGRAM)))
    assert "nothing to change" in run.invoke(app(), command).output
    (tmp_path / "tandem-other.service").write_text("[Service]\nExecStart=/bin/true\n")
    (tmp_path / "tandem-gateway.service").write_text("[Service]\n")
    refused = run.invoke(app(), command)
    assert refused.exit_code == 1
    assert run.invoke(app(), ["systemd", "uninstall", "--directory", str(tmp_path)]).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"tandem-other.service", "tandem-gateway.service"}


@pytest.mark.parametrize(
    "flags", [["--engines", "0"], ["--port", "0"], ["--program", "tandem"], ["--program", "/no/such/tandem"]]
)
def test_bad_values_write_nothing(flags: list[str], tmp_path: Path) -> None:
    words = ["systemd", "install", "--directory", str(tmp_path), "--program", PROGRAM, *flags]
    assert CliRunner().invoke(app(), words).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_every_unit_says_where_it_comes_from() -> None:
    assert all(text.startswith(HEADER) for text in units(Plan(PROGRAM)).values())
