from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from pydantic import Field, SecretStr
from typer.testing import CliRunner

from tandem.cli.flags import command, settings_flags
from tandem.cli.main import build_app
from tandem.cli.services import SERVICES
from tandem.settings import Settings, env_name

runner = CliRunner()


class Sample(Settings):
    service: ClassVar[str] = "engine"

    size: int = Field(3, ge=1, description="how many")
    quick: bool = Field(False, description="hurry")
    limit: float | None = Field(None, description="at most")
    token: SecretStr | None = Field(None, description="secret")


def invoke(arguments: list[str]) -> tuple[Any, list[tuple[dict[str, Any], Path | None]]]:
    calls: list[tuple[dict[str, Any], Path | None]] = []
    app = typer.Typer()
    app.command()(command(settings_flags(Sample), lambda flags, config: calls.append((flags, config)), "Doc."))
    return runner.invoke(app, arguments), calls


def test_only_given_flags_reach_the_settings() -> None:
    result, calls = invoke(["--size", "5", "--quick", "--config", "a.toml"])
    assert result.exit_code == 0, result.output
    assert calls == [({"size": "5", "quick": True}, Path("a.toml"))]
    _, calls = invoke(["--no-quick"])
    assert calls == [({"quick": False}, None)]


def test_help_names_type_default_and_variable_but_no_secret() -> None:
    result, _ = invoke(["--help"])
    text = " ".join(result.output.split())
    assert "--size" in text
    assert "TANDEM_SIZE" in text.replace("\n", "")
    assert "--token" not in text


def test_unknown_flags_are_refused() -> None:
    result, calls = invoke(["--sise", "5"])
    assert result.exit_code == 2
    assert calls == []


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_setting_of_every_service_is_a_documented_flag(name: str) -> None:
    cls = SERVICES[name].settings()
    result = runner.invoke(build_app(name), [name, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
    assert result.exit_code == 0, result.output
    for flag in settings_flags(cls):
        assert "--" + flag.name.replace("_", "-") in result.output
        assert env_name(flag.name) in result.output
        assert flag.info.description, f"{name}.{flag.name} has no description"


def test_bad_values_are_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    result = runner.invoke(build_app("router"), ["router", "--policy", "dice"])
    assert result.exit_code == 2
    assert "--policy (from flag) is 'dice'" in result.output + capsys.readouterr().err


def test_config_show_tells_value_and_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "tandem.toml"
    config.write_text("[router]\nmax-retries = 1\npolicy = 'round_robin'\n")
    monkeypatch.setenv("TANDEM_POLICY", "least_load")
    result = runner.invoke(build_app("config"), ["config", "show", "router", "--json", "--config", str(config)])
    assert result.exit_code == 0, result.output
    rows = {row["setting"]: (row["value"], row["origin"]) for row in json.loads(result.output)}
    assert rows["policy"] == ("least_load", "environment")
    assert rows["max_retries"] == (1, "file")
    assert rows["listen"][1] == "default"
    assert runner.invoke(build_app("config"), ["config", "show", "nobody"]).exit_code == 2
