"""Dashboard, alerts and scrape configuration against the names, labels and addresses that the code really has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.deploy.metric_names import Series, all_jobs

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/tandem.json").read_text())
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
# What Prometheus adds by itself.
SCRAPE_LABELS = {"job", "instance"}


def scraped() -> dict[str, dict[str, Series]]:
    """Series by job as Prometheus stores them: after the relabelling of its own configuration."""
    jobs = all_jobs()
    stored: dict[str, dict[str, Series]] = {}
    for config in PROMETHEUS["scrape_configs"]:
        series = jobs[config["job_name"]]
        for rule in config.get("metric_relabel_configs", []):
            assert rule["source_labels"] == [rule["target_label"]] == ["__name__"]
            new = re.sub(r"\$(\d)", r"\\\1", rule["replacement"])
            series = {
                re.sub(rule["regex"], new, name) if re.fullmatch(rule["regex"], name) else name: value
                for name, value in series.items()
            }
        stored[config["job_name"]] = series
    return stored


@pytest.fixture(scope="module")
def known() -> dict[str, Series]:
    everything: dict[str, Series] = {"up": Series("gauge", frozenset(), frozenset())}
    for series in scraped().values():
        everything.update(series)
    return everything


def panels() -> Iterator[tuple[str, str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            # Grafana fills these in before Prometheus sees the expression.
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")
            yield panel["title"], expression, target["legendFormat"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


EXPRESSIONS = [(title, expression) for title, expression, _ in panels()]
EXPRESSIONS += [(rule["alert"], rule["expr"]) for rule in rules()]


def problems(expression: str, known: dict[str, Series]) -> list[str]:
    """Unknown series, unknown labels, and functions that do not fit a series' type."""
    found: list[str] = []
    labels: set[str] = set(SCRAPE_LABELS)
    grouped: set[str] = set()

    def visit(node: Any) -> bool:
        if isinstance(node, promql.Call) and node.func.name in ("rate", "increase"):
            inner = node.args[0].vector_selector
            if known.get(inner.name, Series("counter", frozenset(), frozenset())).kind == "gauge":
                found.append(f"{node.func.name} of the gauge {inner.name}")
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        if not isinstance(node, promql.VectorSelector):
            return True
        series = known.get(node.name)
        if series is None:
            found.append(f"unknown series {node.name}")
            return True
        labels.update(series.labels)
        for matcher in node.matchers.matchers:
            if matcher.name not in series.labels | SCRAPE_LABELS:
                found.append(f"{node.name} has no label {matcher.name}")
            if matcher.name == "state" and not any(re.fullmatch(matcher.value, state) for state in series.states):
                found.append(f"{node.name} is never in state {matcher.value}")
        return True

    promql.walk(promql.parse(expression), visit)
    return [*found, *(f"no series has the label {name}" for name in sorted(grouped - labels))]


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS, ids=[f"{i}-{t}" for i, (t, _) in enumerate(EXPRESSIONS)])
def test_expressions_use_what_is_exported(title: str, expression: str, known: dict[str, Series]) -> None:
    assert problems(expression, known) == []


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(tandem_router_requets_total[5m])", "unknown series"),
        ("vllm:num_requests_running{engine='a'}", "no label engine"),
        ("sum by (proposer) (tandem_engine_steps_total)", "no series has the label proposer"),
        ("tandem_engine_state{state='asleep'}", "never in state"),
        ("rate(vllm:num_requests_running[5m])", "rate of the gauge"),
    ],
)
def test_the_check_finds_mistakes(expression: str, problem: str, known: dict[str, Series]) -> None:
    assert any(problem in found for found in problems(expression, known))


def test_no_series_name_has_two_jobs_once_scraped() -> None:
    """Else a dashboard made for vLLM would count every request in gateway and engine."""
    jobs = scraped()
    for name in jobs["tandem-engine"]:
        if name.startswith("vllm:"):
            assert not any(name in jobs[other] for other in jobs if other != "tandem-engine"), name


def test_engines_export_what_vllm_dashboards_ask_for() -> None:
    names = set(all_jobs()["tandem-engine"])
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum",
        "spec_decode_num_accepted_tokens_total",
    ):
        assert f"vllm:{name}" in names


def test_every_service_tells_memory_and_processor_time() -> None:
    for job, series in all_jobs().items():
        assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= set(series), job


def test_alert_texts_and_legends_use_labels_that_survive_the_expression(known: dict[str, Series]) -> None:
    texts = [(rule["expr"], rule["annotations"]["summary"], r"\$labels\.(\w+)") for rule in rules()]
    texts += [(expression, legend, r"\{\{(\w+)\}\}") for _, expression, legend in panels()]
    for expression, text, pattern in texts:
        for label in re.findall(pattern, text):
            kept = re.findall(r"by \(([^)]*)\)", expression)
            allowed = {name.strip() for group in kept for name in group.split(",")}
            if not kept:
                names = [name for name in known if re.search(rf"(?<![\w:]){re.escape(name)}(?![\w:])", expression)]
                allowed = SCRAPE_LABELS.union(*(known[name].labels for name in names))
            assert label in allowed, (expression, label)


def test_alerts_are_complete_and_explained() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert f"`{rule['alert']}`" in page, f"docs/operations.md does not say what to do about {rule['alert']}"
    assert len({rule["alert"] for rule in rules()}) == len(rules())


def test_compose_scrapes_where_the_services_listen() -> None:
    services = COMPOSE["services"]
    jobs = {config["job_name"]: config for config in PROMETHEUS["scrape_configs"]}
    router = services["router"]["command"]
    port = router[router.index("--metrics-port") + 1]
    assert jobs["tandem-router"]["static_configs"][0]["targets"] == [f"router:{port}"]
    engine = jobs["tandem-engine"]["dns_sd_configs"][0]
    for letter in "ab":
        definition = services[f"engine-{letter}"]
        assert definition["environment"]["TANDEM_METRICS_LISTEN"] == f"0.0.0.0:{engine['port']}"
        assert engine["names"] == definition["networks"]["inside"]["aliases"]
    assert jobs["tandem-gateway"]["static_configs"][0]["targets"] == ["gateway:8000"]


def test_monitoring_is_a_profile_on_loopback_that_mounts_what_is_here() -> None:
    for name in ("prometheus", "grafana"):
        definition = COMPOSE["services"][name]
        assert definition["profiles"] == ["monitoring"]
        assert all(port.startswith("127.0.0.1:") for port in definition["ports"])
        mounts = [volume for volume in definition["volumes"] if volume.startswith("./")]
        assert mounts
        for mount in mounts:
            source, _, mode = mount.split(":")
            assert (ROOT / source).exists() and mode == "ro", mount
    monitoring = ("prometheus", "grafana", "jaeger")
    assert all("profiles" not in d for n, d in COMPOSE["services"].items() if n not in monitoring)


def test_traces_have_a_collector_in_the_profile_and_are_off_by_default() -> None:
    jaeger = COMPOSE["services"]["jaeger"]
    assert jaeger["profiles"] == ["monitoring"] and re.fullmatch(r"\S+:\d+\.\d+\.\d+", jaeger["image"])
    assert all(port.startswith("127.0.0.1:") for port in jaeger["ports"])
    for name in ("gateway", "router", "engine-a", "engine-b"):
        definition = COMPOSE["services"][name]
        assert definition["environment"]["TANDEM_OTLP_ENDPOINT"] == "${TANDEM_OTLP_ENDPOINT:-}"
        assert set(jaeger["networks"]) & set(definition["networks"])
    assert "TANDEM_OTLP_ENDPOINT=http://jaeger:4317 " in (ROOT / "docs/operations.md").read_text()
    # The image must be able to.
    assert "['traces']" in (ROOT / "Dockerfile").read_text()


def test_the_dashboard_is_well_formed() -> None:
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    sources = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
