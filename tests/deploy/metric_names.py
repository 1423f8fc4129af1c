"""Names, types and labels of every metric that the code exports, by scrape job, taken from its own registries."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from draft_service.metrics import DraftCollector
from draft_service.service import Counters
from engine_service.engine import Engine
from engine_service.metrics import EngineMetrics
from engine_service.settings import EngineSettings
from engine_service.speculation import NullSpeculation
from engine_service.speculation.client import ClientStats
from engine_service.speculation.stats import SpeculationStats
from gateway.metrics import Metrics
from router.admission import Admission
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.settings import RouterSettings
from tandem.metrics import GpuCollector, new_registry
from tandem.tracing.queue import SpanQueue
from tests.engine_service.fakes import FakeRunner, byte_tokenizer

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@dataclass(frozen=True)
class Series:
    """A series' type and the labels that the code gives it."""

    kind: str
    labels: frozenset[str]
    # Values of the label "state", which are an enum's names.
    states: frozenset[str]


def series_of(registry: CollectorRegistry) -> dict[str, Series]:
    """By sample name. Families without samples yet tell their labels through the object that makes them."""
    makers: dict[str, Any] = {getattr(made, "_name", ""): made for made in registry._collector_to_names}
    found = {}
    for family in registry.collect():
        labels = {label for sample in family.samples for label in sample.labels}
        labels |= set(getattr(makers.get(family.name), "_labelnames", ()))
        states = frozenset(sample.labels["state"] for sample in family.samples if "state" in sample.labels)
        for suffix in _SUFFIXES[family.type]:
            own = labels | {"le"} if suffix == "_bucket" else labels - {"le"}
            found[family.name + suffix] = Series(family.type, frozenset(own), states)
    return found


def engine_registry() -> CollectorRegistry:
    class Speculation(NullSpeculation):
        def __init__(self) -> None:
            self.stats = SpeculationStats(ClientStats())
            self.stats.proposer("ngram").add(2, 1)

    registry = new_registry()
    registry.register(GpuCollector(_Nvml()))
    EngineMetrics(Engine(EngineSettings(), FakeRunner(), byte_tokenizer(), Speculation(), ("fake",)), registry)
    return registry


def router_registry() -> CollectorRegistry:
    settings = RouterSettings(engines="127.0.0.1:1")
    metrics = RouterMetrics()
    fleet = Fleet(settings)
    engine: Any = SimpleNamespace(
        address="127.0.0.1:1", state=1, load=SimpleNamespace(in_flight=0), feed=SimpleNamespace(indexed=lambda: 0)
    )
    fleet.engines[engine.address] = engine
    admission = Admission(fleet, settings)
    admission.depth_by_priority = lambda: {0: 1}  # type: ignore[method-assign]
    metrics.watch(fleet, admission)
    return metrics.registry


def draft_registry() -> CollectorRegistry:
    registry = new_registry()
    registry.register(DraftCollector(lambda: Counters(1, 1, 1, 1, 1.0)))
    return registry


def traces() -> dict[str, Series]:
    """What every service adds that sends traces."""
    registry = CollectorRegistry()
    counted: Any = SimpleNamespace(exported=0, dropped={})
    SpanQueue.watch(counted, registry)
    return series_of(registry)


def all_jobs() -> dict[str, dict[str, Series]]:
    return {
        "tandem-gateway": series_of(Metrics().registry),
        "tandem-router": series_of(router_registry()),
        "tandem-engine": series_of(engine_registry()),
        "tandem-draft": series_of(draft_registry()),
    }


class _Nvml:
    NVMLError = RuntimeError

    def __getattr__(self, name: str) -> Any:
        return {
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: "GPU",
            "nvmlDeviceGetMemoryInfo": lambda handle: type("Memory", (), {"used": 1, "total": 2}),
            "nvmlDeviceGetUtilizationRates": lambda handle: type("Rates", (), {"gpu": 1}),
        }[name]
