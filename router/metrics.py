"""Prometheus metrics of one router. Each has its own registry, so that several live in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.metrics import new_registry
from tandem.router.v1 import router_pb2 as rpb

if TYPE_CHECKING:
    from router.admission import Admission
    from router.fleet import Fleet

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RouterMetrics:
    """Counters and histograms by name; gauges are read from the fleet when asked for."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or new_registry()
        new = self.registry
        self.requests = Counter("tandem_router_requests", "Finished requests.", ["outcome"], registry=new)
        self.retries = Counter("tandem_router_retries", "Attempts after the first.", ["kind"], registry=new)
        self.failures = Counter("tandem_router_engine_failures", "Failed attempts.", ["reason"], registry=new)
        self.unresumable = Counter(
            "tandem_router_unresumable", "Streams that outgrew the memory for resuming.", registry=new
        )
        self.ttft = Histogram(
            "tandem_router_ttft_seconds", "From arrival to the first token.", buckets=_SECONDS, registry=new
        )
        self.queue = Histogram(
            "tandem_router_queue_seconds", "Wait of an attempt for an engine.", buckets=_SECONDS, registry=new
        )
        self.prompt_tokens = Counter("tandem_router_prompt_tokens", "Prompt tokens of accepted requests.", registry=new)
        self.cached_tokens = Counter("tandem_router_cached_tokens", "Of these, read from a prefix cache.", registry=new)
        self.predicted_tokens = Counter(
            "tandem_router_predicted_cached_tokens", "Of these, predicted to be cached.", registry=new
        )
        self.prediction_error = Histogram(
            "tandem_router_prediction_error_tokens",
            "Absolute difference of predicted and actual cached tokens.",
            buckets=(0, 16, 64, 256, 1024, 4096, 16384, 65536),
            registry=new,
        )

    def prediction(self, prompt_tokens: int, predicted: int, actual: int) -> None:
        """Notes how far the prefix index was off, in tokens. The last prompt token is never read from a cache."""
        predicted = min(predicted, max(0, prompt_tokens - 1))
        self.prompt_tokens.inc(prompt_tokens)
        self.cached_tokens.inc(actual)
        self.predicted_tokens.inc(predicted)
        self.prediction_error.observe(abs(predicted - actual))

    def watch(self, fleet: Fleet, admission: Admission) -> None:
        """Adds the gauges of a fleet and its queue."""
        self.registry.register(_FleetCollector(fleet, admission))

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self.registry)


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet, admission: Admission) -> None:
        self._fleet = fleet
        self._admission = admission

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily("tandem_router_engines", "Engines by state.", labels=["state"])
        counts = dict.fromkeys(rpb.FleetState.values(), 0)
        flight = GaugeMetricFamily("tandem_router_in_flight", "Requests in flight.", labels=["engine"])
        blocks = GaugeMetricFamily("tandem_router_indexed_blocks", "Blocks in the prefix index.", labels=["engine"])
        for engine in list(self._fleet.engines.values()):
            counts[engine.state] += 1
            flight.add_metric([engine.address], engine.load.in_flight)
            blocks.add_metric([engine.address], engine.feed.indexed())
        for state, count in counts.items():
            if state:
                states.add_metric([rpb.FleetState.Name(state).removeprefix("FLEET_STATE_").lower()], count)
        queued = GaugeMetricFamily("tandem_router_queued", "Waiting requests.", labels=["priority"])
        for priority, depth in self._admission.depth_by_priority().items():
            queued.add_metric([str(priority)], depth)
        yield from (states, flight, blocks, queued)
        yield GaugeMetricFamily("tandem_router_index_pairs", "Pairs in the index.", value=self._fleet.index.pairs)
        yield GaugeMetricFamily("tandem_router_index_refused", "Blocks over the cap.", value=self._fleet.index.refused)
        yield CounterMetricFamily("tandem_router_shed", "Requests shed since start.", value=self._admission.shed)
