"""The gateway's latency histograms as numbers, for the live page."""

from __future__ import annotations

import os
from typing import Any

from prometheus_client import CollectorRegistry, multiprocess

from gateway.metrics import Metrics

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:inter_token_latency_seconds": "itl",
    "vllm:e2e_request_latency_seconds": "e2e",
}


def _registry(metrics: Metrics) -> CollectorRegistry:
    """This process's registry, or one over all workers if there are several."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return metrics.registry
    total = CollectorRegistry()
    multiprocess.MultiProcessCollector(total)  # type: ignore[no-untyped-call]
    return total


def latency(metrics: Metrics) -> dict[str, Any]:
    """Histograms since the start, over all models: upper bounds in seconds, cumulative counts (one more), sum."""
    found: dict[str, dict[float, float]] = {key: {} for key in HISTOGRAMS.values()}
    sums = dict.fromkeys(found, 0.0)
    for metric in _registry(metrics).collect():
        key = HISTOGRAMS.get(metric.name)
        if key is None:
            continue
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                found[key][bound] = found[key].get(bound, 0.0) + sample.value
            elif sample.name.endswith("_sum"):
                sums[key] += sample.value
    # The last bound is infinite, which JSON cannot say.
    return {
        key: {
            "bounds": sorted(buckets)[:-1],
            "counts": [buckets[bound] for bound in sorted(buckets)],
            "sum": sums[key],
        }
        for key, buckets in found.items()
    }
