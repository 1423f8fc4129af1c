"""Between requests and the collector: a bounded queue and a thread. Whatever the collector does, no request waits."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, Counter

log = logging.getLogger("tandem.tracing")

# Spans; one takes 2 to 4 KB.
MAX_QUEUED = 4096
MAX_BATCH = 512
INTERVAL_S = 1.0
# How long a process that ends tries to send what waits.
CLOSE_S = 3.0


class _LastWords(logging.Handler):
    """Keeps what the exporters complain of. They repeat it with every try; we say it once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:300]


_WORDS = _LastWords()


class SpanQueue(SpanProcessor):
    """Takes ended spans and exports them in batches. Counts what was exported and what was dropped, and why."""

    def __init__(
        self,
        exporter: SpanExporter,
        where: str,
        max_queued: int = MAX_QUEUED,
        max_batch: int = MAX_BATCH,
        interval_s: float | None = None,
    ) -> None:
        """where: the endpoint, for log lines. interval_s: longest wait of a span for others; default INTERVAL_S."""
        self._exporter = exporter
        self._where = where
        self._max_queued = max_queued
        self._max_batch = max_batch
        self._interval_s = INTERVAL_S if interval_s is None else interval_s
        self._waiting: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._abandoned = False
        self._broken = False
        self.exported = 0
        self.dropped: dict[str, int] = {}
        self._counters: tuple[Counter, Counter] | None = None
        self._lock = threading.Lock()
        noisy = logging.getLogger("opentelemetry.exporter")
        noisy.propagate = False
        if _WORDS not in noisy.handlers:
            noisy.addHandler(_WORDS)
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def watch(self, registry: CollectorRegistry) -> None:
        """Adds the counters to a registry, with what was counted so far."""
        exported = Counter("tandem_trace_spans_exported", "Spans that the collector has taken.", registry=registry)
        dropped = Counter("tandem_trace_spans_dropped", "Spans that were lost.", ["reason"], registry=registry)
        exported.inc(self.exported)
        for reason in ("queue_full", "export_failed", "shutdown"):
            dropped.labels(reason).inc(self.dropped.get(reason, 0))
        self._counters = exported, dropped

    # For the SDK

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing."""

    def on_end(self, span: ReadableSpan) -> None:
        if self._closing or len(self._waiting) >= self._max_queued:
            self._drop("shutdown" if self._closing else "queue_full", 1)
            return
        self._waiting.append(span)
        if len(self._waiting) >= self._max_batch:
            self._wake.set()

    def shutdown(self) -> None:
        self.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Waits until nothing is queued. Tests use it; the thread does the work."""
        end = time.monotonic() + timeout_millis / 1000
        while self._waiting and time.monotonic() < end:
            self._wake.set()
            time.sleep(0.005)
        return not self._waiting

    def close(self) -> None:
        """Sends what waits, within CLOSE_S seconds. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        # Ends a try that still waits for the collector.
        self._exporter.shutdown()
        self._thread.join(0.5)
        self._abandoned = self._thread.is_alive()
        if self._waiting:
            self._drop("shutdown", len(self._waiting))
            log.warning("spans were not sent", extra={"spans": len(self._waiting), "endpoint": self._where})

    # The thread

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            self._send_all()
        # What came in between the last turn and the end.
        self._send_all()

    def _send_all(self) -> None:
        while self._waiting:
            # They stay in the queue until they are sent, so that its bound holds for what is under way too.
            batch = [self._waiting[index] for index in range(min(len(self._waiting), self._max_batch))]
            sent = self._send(batch)
            if self._abandoned:
                # Nobody waited for this: it was counted as lost.
                return
            for _ in batch:
                self._waiting.popleft()
            if not sent:
                self._drop("export_failed", len(batch))
                # One try a turn: the next batch would fare no better.
                return
            self.exported += len(batch)
            if self._counters is not None:
                self._counters[0].inc(len(batch))

    def _send(self, batch: list[ReadableSpan]) -> bool:
        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:
            _WORDS.text, sent = f"{type(error).__name__}: {error}"[:300], False
        if sent == self._broken:
            self._broken = not sent
            if sent:
                log.info("traces are sent again", extra={"endpoint": self._where})
            else:
                log.warning("traces cannot be sent", extra={"endpoint": self._where, "why": _WORDS.text})
        return sent

    def _drop(self, reason: str, count: int) -> None:
        with self._lock:
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        if self._counters is not None:
            self._counters[1].labels(reason).inc(count)
