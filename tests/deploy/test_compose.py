"""The compose file against the settings: what it sets must exist, and its promises must be in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli.services import SERVICES
from tandem.settings import env_name

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / name).read_text()))


COMPOSE = load("docker-compose.yml")
# Services of ours; others (Prometheus, Grafana) are what test_monitoring.py looks at.
OURS = {name: definition for name, definition in COMPOSE["services"].items() if "profiles" not in definition}


def service_of(definition: dict[str, Any]) -> str:
    return str(definition["command"][0])


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_variable_and_flag_is_a_setting_of_the_service(name: str) -> None:
    definition = COMPOSE["services"][name]
    fields = SERVICES[service_of(definition)].settings().model_fields
    known = {env_name(field) for field in fields}
    for variable in definition["environment"]:
        assert variable in known or not variable.startswith("TANDEM_"), variable
    flags = [word for word in definition["command"] if word.startswith("--")]
    assert {flag[2:].replace("-", "_") for flag in flags} <= set(fields)


def test_the_gpu_override_sets_what_engines_know() -> None:
    override = load("docker-compose.nvidia.yml")
    fields = SERVICES["engine"].settings().model_fields
    for name in ("engine-a", "engine-b"):
        for variable in override["services"][name]["environment"]:
            assert variable in {env_name(field) for field in fields}
    assert set(override["services"]) <= set(COMPOSE["services"])


def test_only_the_gateway_is_published_and_only_on_loopback() -> None:
    published = {name: definition["ports"] for name, definition in OURS.items() if "ports" in definition}
    assert list(published) == ["gateway"]
    assert all(str(port).startswith("127.0.0.1:") for port in published["gateway"])


def test_a_broken_engine_or_draft_stops_nothing_else() -> None:
    waits = {name: d["depends_on"] for name, d in COMPOSE["services"].items() if "depends_on" in d}
    assert waits == {"gateway": {"router": {"condition": "service_healthy"}}}


def test_engines_share_one_alias_and_each_its_socket_with_its_draft() -> None:
    services = COMPOSE["services"]
    for letter in "ab":
        engine, draft = services[f"engine-{letter}"], services[f"draft-{letter}"]
        assert engine["networks"]["inside"]["aliases"] == ["engines"]
        assert f"sockets-{letter}:/run/tandem" in engine["volumes"]
        assert draft["volumes"] == [f"sockets-{letter}:/run/tandem"]
        assert engine["environment"]["TANDEM_DRAFT"] == draft["environment"]["TANDEM_LISTEN"]
    assert "dns:engines:50051" in services["router"]["command"]


def test_every_service_has_a_health_check() -> None:
    for name, definition in OURS.items():
        assert definition["healthcheck"]["test"][:3] == ["CMD", "tandem", "health"], name


def test_the_image_holds_all_packages_and_runs_as_nobody_in_particular() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for package in ("tandem", "kernels", "engine_service", "draft_service", "router", "gateway"):
        assert f"\nCOPY {package} {package}\n" in text
    assert "\nUSER tandem\n" in text
