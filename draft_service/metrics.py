"""Prometheus metrics of one draft service, read from its counters when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from draft_service.service import Counters


class DraftCollector(Collector):
    """tandem_draft_*."""

    def __init__(self, counters: Callable[[], Counters]) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        now = self._counters()
        yield GaugeMetricFamily("tandem_draft_engines", "Engines connected.", value=now.engines)
        yield GaugeMetricFamily("tandem_draft_sequences", "Sequences held.", value=now.sequences)
        yield CounterMetricFamily("tandem_draft_questions", "Questions answered.", value=now.questions)
        yield CounterMetricFamily("tandem_draft_drafted_tokens", "Tokens guessed.", value=now.drafted_tokens)
        yield CounterMetricFamily("tandem_draft_busy_seconds", "Time spent on answers.", value=now.busy_s)
