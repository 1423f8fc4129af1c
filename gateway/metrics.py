"""Prometheus metrics: vLLM's names for what vLLM has, tandem_gateway_* for the rest."""

from __future__ import annotations

import os

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from tandem.metrics import ProcessCollector, new_registry

_TTFT = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _all_workers() -> list[psutil.Process]:
    """The parent of the workers and all of them."""
    parent = psutil.Process(os.getppid())
    return [parent, *parent.children()]


class Metrics:
    """Counters and histograms of one process; with workers they are added up over all of them."""

    def __init__(self) -> None:
        self.registry = new_registry()
        registry = self.registry
        labels = ["model_name"]
        self.success = Counter(
            "vllm:request_success", "Requests that ended well", [*labels, "finished_reason"], registry=registry
        )
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token", labels, buckets=_TTFT, registry=registry
        )
        self.itl = Histogram(
            "vllm:inter_token_latency_seconds", "Time between streamed deltas", labels, buckets=_ITL, registry=registry
        )
        self.e2e = Histogram(
            "vllm:e2e_request_latency_seconds", "Whole request", labels, buckets=_E2E, registry=registry
        )
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens", labels, registry=registry)
        self.generation_tokens = Counter("vllm:generation_tokens", "Output tokens", labels, registry=registry)
        self.cached_tokens = Counter(
            "vllm:prompt_tokens_cached", "Prompt tokens from the prefix cache", labels, registry=registry
        )
        self.running = Gauge(
            "vllm:num_requests_running",
            "Text requests in this gateway",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.http = Counter("tandem_gateway_http_requests", "HTTP answers", ["path", "status"], registry=registry)
        self.http_seconds = Histogram(
            "tandem_gateway_http_seconds", "Time to the end of the answer", ["path"], buckets=_E2E, registry=registry
        )
        self.disconnects = Counter("tandem_gateway_client_disconnects", "Clients that hung up", registry=registry)
        self.errors = Counter("tandem_gateway_errors", "Error answers and events", ["code"], registry=registry)

    def render(self) -> bytes:
        """The exposition text, over all workers if there are several."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            total = CollectorRegistry()
            multiprocess.MultiProcessCollector(total)  # type: ignore[no-untyped-call]
            total.register(ProcessCollector(_all_workers))
            return generate_latest(total)
        return generate_latest(self.registry)
