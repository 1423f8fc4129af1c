"""Where a setting comes from, and how a bad one is told."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from tandem.settings import Settings, SettingsError, load_settings


class _Demo(Settings):
    service: ClassVar[str] = "gateway"
    port: int = Field(8000, ge=0, le=65535, description="Port.")
    max_body_bytes: int = Field(100, ge=1, description="Limit.")


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[gateway]\nport = 1\nmax-body-bytes = 7\n[engine]\nwhatever = 1\n")
    env = {"TANDEM_PORT": "2"}
    settings, origins = load_settings(_Demo, {"port": 3}, env, file)
    assert (settings.port, settings.max_body_bytes) == (3, 7)
    assert origins == {"port": "flag", "max_body_bytes": "file", "log_level": "default"}
    assert load_settings(_Demo, {}, env, file)[0].port == 2
    assert load_settings(_Demo, {}, {"TANDEM_CONFIG": str(file)})[0].port == 1
    assert load_settings(_Demo, {}, {})[0].port == 8000


def test_settings_are_frozen() -> None:
    settings, _ = load_settings(_Demo, {}, {})
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gateway]\nprot = 1\n", "unknown key 'prot'"),
        ("[gate]\nport = 1\n", r"unknown table \[gate\]"),
        ("[gateway\n", "--config"),
    ],
)
def test_a_bad_file_is_told(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        load_settings(_Demo, {}, {}, file)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        load_settings(_Demo, {}, {}, tmp_path / "absent.toml")


def test_a_bad_value_names_flag_origin_and_value() -> None:
    with pytest.raises(SettingsError, match=r"--port \(from environment\) is '99999'"):
        load_settings(_Demo, {}, {"TANDEM_PORT": "99999"})


def test_kubernetes_service_links_are_diagnosed() -> None:
    with pytest.raises(SettingsError, match="enableServiceLinks: false"):
        load_settings(_Demo, {}, {"TANDEM_PORT": "tcp://10.0.0.1:8000"})
