"""docs/api.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.api_page import BODIES, field_table, renew
from gateway.metrics import Metrics
from gateway.routes import ROUTERS
from gateway.schemas.base import field_kind
from gateway.settings import GatewaySettings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


def test_tables_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    assert renew(text) == text, "run: python -m gateway.api_page docs/api.md"
    assert set(re.findall(r"<!-- table (\w+) -->", text)) == {*BODIES, "errors"}


def test_every_endpoint_is_listed() -> None:
    listed = set(re.findall(r"^\| `(\w+ /\S*)` \|", PAGE.read_text(), re.MULTILINE))
    served = {
        f"{method} {route.path.replace(':path', '')}"
        for router in ROUTERS
        for route in router.routes
        for method in route.methods  # type: ignore[attr-defined]
    }
    assert listed == served | {"GET /openapi.json"}


def test_flags_that_are_named_exist() -> None:
    flags = {name.replace("_", "-") for name in GatewaySettings.model_fields}
    flags |= {
        "no-" + name.replace("_", "-") for name, field in GatewaySettings.model_fields.items() if field.default is True
    }
    assert set(re.findall(r"`--([a-z-]+)", PAGE.read_text())) <= flags


def test_metrics_that_are_named_exist() -> None:
    named = set(re.findall(r"`((?:vllm:|tandem_gateway_)\w+)`", PAGE.read_text()))
    have = {metric.name for metric in Metrics().registry.collect() if not metric.name.startswith("process_")}
    assert {name.removesuffix("_total") for name in named} == have


@pytest.mark.parametrize("name", sorted(BODIES))
def test_every_field_has_a_row_with_its_kind(name: str) -> None:
    model = BODIES[name]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", field_table(model), re.MULTILINE))
    assert set(rows) == set(model.model_fields)
    for field, kind in rows.items():
        assert kind == "required" or kind == field_kind(model, field)
