"""Prometheus metrics of one engine: vLLM's names for what vLLM has, tandem_engine_* and tandem_speculation_* beside.

Counters of the step loop are read when asked for, so that they cost nothing while nobody asks; histograms are fed on
the event loop, beside compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.engine.v1 import engine_pb2

if TYPE_CHECKING:
    from engine_service.engine import Engine
    from engine_service.output import Stream
    from engine_service.speculation.stats import SpeculationStats
    from tandem.traffic import TrafficStats

# Seconds. vLLM's bounds, so that its dashboards' heat maps keep their shape.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_MODEL = "model_name"


class EngineMetrics:
    """What requests went through. `delivered` and `closed` are called on the event loop."""

    def __init__(self, engine: Engine, registry: CollectorRegistry) -> None:
        model = engine.names[0]
        self._model = model

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, doc, [_MODEL], buckets=buckets, registry=registry).labels(model)

        def counter(name: str, doc: str) -> Counter:
            return Counter(name, doc, [_MODEL], registry=registry).labels(model)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between two steps that gave tokens.", _ITL)
        self._queue = histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", _LONG)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From first step to first token.", _LONG)
        self._decode = histogram("vllm:request_decode_time_seconds", "From first token to last.", _LONG)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _LONG)
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Decode time of a request per token after its first.", _ITL
        )
        self._prompt_size = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self._output_size = histogram("vllm:request_generation_tokens", "Output tokens per request.", _TOKENS)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens, cached ones included.")
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Of these, found.")
        self._success = Counter(
            "vllm:request_success", "Finished requests.", [_MODEL, "finished_reason"], registry=registry
        )
        self._aborted = counter("tandem_engine_requests_aborted", "Requests that ended without a usage event.")
        registry.register(_EngineCollector(engine))

    def delivered(self, stream: Stream, times: Sequence[float]) -> None:
        """Steps that ended at these times gave tokens to this stream."""
        request, last = stream.request, stream.last_delivery
        for at in times:
            if stream.last_delivery is not None:
                self._itl.observe(at - stream.last_delivery)
            stream.last_delivery = at
        if last is not None:
            return
        first, token = request.first_step, request.first_token
        self._prompt_tokens.inc(len(request.prompt))
        if not request.score_prompt:
            self._queries.inc(len(request.prompt))
            self._hits.inc(request.cached_tokens)
        if first is not None and token is not None:
            self._ttft.observe(token - request.arrival)
            self._queue.observe(first - request.arrival)
            self._prefill.observe(token - first)

    def closed(self, stream: Stream) -> None:
        """The call is over."""
        request = stream.request
        if not stream.done:
            self._aborted.inc()
            return
        for reason in stream.finish_reasons:
            self._success.labels(self._model, reason).inc()
        first, last, tokens = request.first_token, request.last_token, stream.completion_tokens
        self._prompt_size.observe(len(request.prompt))
        self._output_size.observe(tokens)
        if first is None or last is None:
            return
        self._decode.observe(last - first)
        self._e2e.observe(last - request.arrival)
        if tokens > 1:
            self._per_token.observe((last - first) / (tokens - 1))


class _EngineCollector(Collector):
    """Reads the step loop's counters when asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        yield from self._vllm()
        yield from self._engine_side()
        stats: SpeculationStats | None = getattr(self._engine.speculation, "stats", None)
        if stats is not None:
            yield from _speculation(stats, self._engine.names[0])
        if self._engine.traffic is not None:
            yield from self._traffic(self._engine.traffic.stats)

    def _traffic(self, stats: TrafficStats) -> Iterator[Metric]:
        model = [self._engine.names[0]]
        yield _counter("tandem_engine_traffic_requests", "Requests that were logged.", stats.written, model)
        yield _counter("tandem_engine_traffic_bytes", "Bytes of them.", stats.bytes, model)
        yield _counter(
            "tandem_engine_traffic_dropped",
            "Requests that could not be logged in time or at all.",
            stats.dropped,
            model,
        )

    def _vllm(self) -> Iterator[Metric]:
        engine, model = self._engine, [self._engine.names[0]]
        stats, blocks = engine.stats, max(1, engine.runner.spec.num_blocks)
        yield _gauge("vllm:num_requests_running", "Sequences in the batch.", stats.running, model)
        yield _gauge("vllm:num_requests_waiting", "Requests that have not run yet.", stats.queued, model)
        yield _gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks held by requests.", stats.blocks_used / blocks, model
        )
        yield _counter("vllm:generation_tokens", "Output tokens.", stats.output_tokens, model)
        yield _counter("vllm:num_preemptions", "Sequences put back for lack of KV blocks.", stats.preemptions, model)

    def _engine_side(self) -> Iterator[Metric]:
        engine, model = self._engine, [self._engine.names[0]]
        stats, spec = engine.stats, engine.runner.spec
        state = GaugeMetricFamily("tandem_engine_state", "1 for the state that the engine is in.", labels=["state"])
        for number, name in engine_pb2.EngineState.items():
            if number != "ENGINE_STATE_UNSPECIFIED":
                state.add_metric([number.removeprefix("ENGINE_STATE_").lower()], float(engine.state == name))
        yield state
        identity = engine.identity
        info = GaugeMetricFamily(
            "tandem_engine_info",
            "1; what this engine is.",
            labels=["model_name", "engine", "numerics_id", "kernel_path"],
        )
        info.add_metric([identity.model, identity.engine, identity.numerics_id, identity.kernel_path], 1)
        yield info
        blocks = GaugeMetricFamily("tandem_engine_kv_blocks", "KV blocks by use.", labels=["use"])
        for use, count in (("held", stats.blocks_used), ("cached", stats.blocks_cached), ("all", spec.num_blocks)):
            blocks.add_metric([use], count)
        yield blocks
        yield _gauge("tandem_engine_epoch", "Number of this process' life.", engine.epoch, model)
        yield _gauge("tandem_engine_max_num_seqs", "Places in the batch.", engine.settings.max_num_seqs, model)
        yield _gauge("tandem_engine_decode_step_seconds", "Decode step, smoothed.", stats.decode_step_ms / 1000, model)
        yield _gauge("tandem_engine_longest_step_seconds", "Longest step.", stats.longest_step_ms / 1000, model)
        yield _counter("tandem_engine_steps", "Steps.", stats.steps, model)
        yield _counter("tandem_engine_prefill_tokens", "Prompt tokens computed.", stats.prefill_tokens, model)


def _speculation(stats: SpeculationStats, model: str) -> Iterator[Metric]:
    """Totals under vLLM's names; by proposer and position, and the questions to the draft, under ours."""
    proposers = dict(stats.proposers)
    client, labels = stats.client, [model]
    yield _counter("vllm:spec_decode_num_drafts", "Verified drafts.", sum(p.drafts for p in proposers.values()), labels)
    yield _counter("vllm:spec_decode_num_draft_tokens", "Verified draft tokens.", stats.proposed, labels)
    yield _counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", stats.accepted, labels)
    by_position = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by position.", labels=[_MODEL, "position"]
    )
    names = ["proposer", "position"]
    proposed = CounterMetricFamily("tandem_speculation_proposed_tokens", "Verified draft tokens.", labels=names)
    accepted = CounterMetricFamily("tandem_speculation_accepted_tokens", "Accepted draft tokens.", labels=names)
    length = GaugeMetricFamily(
        "tandem_speculation_acceptance_length", "Tokens committed per verified draft.", labels=["proposer"]
    )
    totals: dict[int, int] = {}
    for name, entry in proposers.items():
        length.add_metric([name], entry.acceptance_length)
        for position, count in enumerate(entry.proposed_at):
            if count:
                proposed.add_metric([name, str(position)], count)
                accepted.add_metric([name, str(position)], entry.accepted_at[position])
                totals[position] = totals.get(position, 0) + entry.accepted_at[position]
    for position, count in sorted(totals.items()):
        by_position.add_metric([model, str(position)], count)
    yield from (by_position, proposed, accepted, length)
    for name, doc, value in (
        ("steps", "Steps for which drafts were sought.", stats.steps),
        ("steps_with_drafts", "Steps that ran with drafts.", stats.steps_with_drafts),
        ("waited_seconds", "Time that steps waited for drafts.", stats.waited_us / 1e6),
        ("questions", "Questions to the draft.", client.questions),
        ("answers", "Answers of the draft.", client.answers),
        ("answer_seconds", "Time from question to answer, summed.", client.latency_us_sum / 1e6),
        ("deadline_misses", "Questions without an answer when the step had to go on.", client.misses),
        ("lost", "Questions that the end of a stream left without an answer.", client.lost),
        ("connects", "Streams opened to the draft.", client.connects),
        ("disconnects", "Streams that ended.", client.disconnects),
        ("resyncs", "Sequences told anew.", stats.resyncs),
        ("bad_proposals", "Malformed proposals, and sequences that the draft refused.", stats.bad),
        ("stale_proposals", "Proposals that no longer fitted.", stats.stale),
        ("head_calls", "Steps in which the head drafted.", stats.head.calls),
        ("head_tokens", "Tokens that the head drafted, verified or not.", stats.head.drafted),
        ("head_seconds", "Time that the head took.", stats.head.spent_us / 1e6),
        ("errors", "Own errors that cost drafts; each is a bug.", stats.errors),
    ):
        yield _counter(f"tandem_speculation_{name}", doc, value, labels)


def _gauge(name: str, doc: str, value: float, model: list[str]) -> Metric:
    family = GaugeMetricFamily(name, doc, labels=[_MODEL])
    family.add_metric(model, value)
    return family


def _counter(name: str, doc: str, value: float, model: list[str]) -> Metric:
    family = CounterMetricFamily(name, doc, labels=[_MODEL])
    family.add_metric(model, value)
    return family
