"""Prometheus plumbing that every service uses: an HTTP listener, and what is known of any process and its GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIServer

import psutil
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class MetricsServer:
    """Serves one registry over HTTP in a thread. `port` is the one that was bound."""

    def __init__(self, registry: CollectorRegistry, address: str) -> None:
        """Binds and serves at once.

        Raises:
            OSError: the address cannot be bound.
        """
        host, _, port = address.rpartition(":")
        try:
            started: tuple[WSGIServer, threading.Thread] = start_http_server(
                int(port), host.strip("[]"), registry=registry
            )
        except OSError as error:
            raise OSError(error.errno, f"metrics cannot be served on {address}: {error.strerror}") from error
        self._server, self._thread = started
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stops; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._server.shutdown()
            self._server.server_close()
        self._thread.join(1.0)


class ProcessCollector(Collector):
    """Memory and processor time, under the names of Prometheus' own client libraries, summed over `processes`."""

    def __init__(self, processes: Callable[[], list[psutil.Process]] | None = None) -> None:
        """processes: whom to add up at each scrape; default: this process."""
        this = psutil.Process()
        self._processes = processes or (lambda: [this])

    def collect(self) -> Iterable[Metric]:
        resident, seconds, started = 0, 0.0, 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                resident += process.memory_info().rss
                times = process.cpu_times()
                seconds += times.user + times.system
                started = max(started, process.create_time())
        yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", value=resident)
        yield CounterMetricFamily("process_cpu_seconds", "Processor time, user and system.", value=seconds)
        yield GaugeMetricFamily("process_start_time_seconds", "Start, Unix time.", value=started)


class GpuCollector(Collector):
    """Memory and utilisation of the NVIDIA GPUs of this machine, as NVML tells them."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def collect(self) -> Iterable[Metric]:
        labels = ["gpu", "name"]
        used = GaugeMetricFamily("tandem_gpu_memory_used_bytes", "GPU memory in use by all processes.", labels=labels)
        total = GaugeMetricFamily("tandem_gpu_memory_total_bytes", "GPU memory.", labels=labels)
        busy = GaugeMetricFamily("tandem_gpu_utilization_ratio", "Share of time with a kernel running.", labels=labels)
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(handle)
            values = [str(index), name.decode() if isinstance(name, bytes) else str(name)]
            # Not every device tells everything (a MIG slice has no utilisation): what is not told is left out.
            with contextlib.suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                used.add_metric(values, memory.used)
                total.add_metric(values, memory.total)
            with contextlib.suppress(nvml.NVMLError):
                busy.add_metric(values, nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        yield from (used, total, busy)


def gpu_collector() -> GpuCollector | None:
    """None where NVML's Python module, driver or device is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return GpuCollector(pynvml) if pynvml.nvmlDeviceGetCount() else None
    except Exception:
        return None


def new_registry(gpu: bool = False) -> CollectorRegistry:
    """A registry that tells of this process, and of the GPUs if wanted and there."""
    registry = CollectorRegistry()
    registry.register(ProcessCollector())
    devices = gpu_collector() if gpu else None
    if devices is not None:
        registry.register(devices)
    return registry
