"""What a draft's counters look like to Prometheus."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import generate_latest

from draft_service.metrics import DraftCollector
from draft_service.service import Counters
from draft_service.settings import DraftSettings
from tandem.metrics import MetricsServer, new_registry


def test_counters_are_served_over_http_beside_those_of_the_process() -> None:
    registry = new_registry()
    counters = Counters(engines=1, sequences=3, questions=7, drafted_tokens=20, busy_s=0.5)
    registry.register(DraftCollector(lambda: counters))
    server = MetricsServer(registry, "127.0.0.1:0")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        with pytest.raises(OSError, match="metrics cannot be served on"):
            MetricsServer(registry, f"127.0.0.1:{server.port}")
    finally:
        server.close()
    lines = text.splitlines()
    assert "tandem_draft_questions_total 7.0" in lines and "tandem_draft_sequences 3.0" in lines
    assert "tandem_draft_busy_seconds_total 0.5" in lines and "tandem_draft_drafted_tokens_total 20.0" in lines
    assert any(line.startswith("process_cpu_seconds_total ") for line in lines)
    assert generate_latest(registry)


def test_metrics_need_a_port() -> None:
    assert DraftSettings().metrics_listen == ""
    with pytest.raises(ValueError, match="host:port is needed"):
        DraftSettings(metrics_listen="unix:/run/m.sock")
