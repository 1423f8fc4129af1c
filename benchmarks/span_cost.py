"""What one traced request costs each service: CPU time of its spans, from the headers to the collector.

The services' own code makes the spans of one request, without a model and in this process; a sink process takes them.
To be compared with the CPU time of a whole request, as benchmarks.observability prints it.

    python -m benchmarks.span_cost
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.observability import running_sink
from engine_service.output import Identity
from engine_service.requests import Request
from engine_service.tracing import TracedRequest
from gateway.context import RequestContext
from gateway.schemas.completions import CompletionBody
from gateway.tracing import begin, finish, request_attributes
from router import tracing as router_tracing
from router.settings import RouterSettings
from tandem.inference.v1 import inference_pb2 as pb
from tandem.lm.types import SamplingParams
from tandem.tracing import NULL_TRACER, Tracer, open_tracer

PARENT = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
REQUEST = pb.GenerateRequest(model="m", request_id="r", stop=pb.StopConditions(max_tokens=64))
USAGE = pb.Usage(prompt_tokens=128, completion_tokens=64)
SCOPE = {
    "method": "POST",
    "path": "/v1/completions",
    "scheme": "http",
    "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"accept", b"*/*")],
}
BODY = CompletionBody(prompt=["x"], max_tokens=64, temperature=0.0, stream=True)


def gateway(tracer: Tracer) -> None:
    """As gateway.middleware and gateway.text do it."""
    context = RequestContext("r")
    if tracer.on:
        context.span = begin(tracer, SCOPE, context)
    if context.span.recording:
        request_attributes(context.span, BODY, REQUEST)
        finish(context.span, context, "/v1/completions", 200, "POST")
    context.span.end()


def router(tracer: Tracer) -> None:
    """As router.service and router.forward do it, with one attempt that did not wait."""
    span = tracer.serve("route", lambda: PARENT)
    if span.recording:
        router_tracing.request(span, "x/Generate", REQUEST)
        candidate = SimpleNamespace(matched_blocks=3, predicted_s=0.1)
        grant = SimpleNamespace(engine=SimpleNamespace(address="e"), candidate=candidate, candidates=[candidate])
        decision = SimpleNamespace(attempt=1, policy="prefix_exact", reason="holds 48 prompt tokens")
        router_tracing.attempt(span, cast(Any, decision), cast(Any, grant), 0.0, 0.0)
        router_tracing.finished(span, "ok", "e", 1, 0.0, 0.1, USAGE)
    span.end()


def engine(tracer: Tracer) -> None:
    """As engine_service.service does it: generate, queue, prefill and decode."""
    now = time.monotonic()
    span = tracer.serve("generate", lambda: PARENT, now)
    if not span.recording:
        return
    request = Request(1, "r", SamplingParams(), [1] * 128, now, first_step=now, first_token=now, last_token=now)
    outbox = SimpleNamespace(error=None)
    stream = SimpleNamespace(request=request, outbox=outbox, completion_tokens=64, finish_reasons=["length"])
    TracedRequest(span, REQUEST, now).finished(cast(Any, stream), Identity(1, "e", "m", "n", True, "cpu"), "finished")


def cost_us(work: Callable[[Tracer], None], tracer: Tracer, count: int, rounds: int) -> float:
    """CPU microseconds of one call, all threads of this process, export included; the median of some rounds."""
    values = []
    for _ in range(rounds):
        before = time.process_time()
        for _ in range(count):
            work(tracer)
        flush = getattr(getattr(tracer, "queue", None), "force_flush", None)
        if flush is not None:
            flush()
        values.append((time.process_time() - before) / count * 1e6)
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="requests per round; under the queue's bound")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with running_sink() as endpoint:
        tracer = open_tracer(RouterSettings(otlp_endpoint=endpoint), "router")
        # What making the stand-ins costs is in both.
        for name, work in (("gateway", gateway), ("router", router), ("engine", engine)):
            on = cost_us(work, tracer, options.count, options.rounds)
            off = cost_us(work, NULL_TRACER, options.count, options.rounds)
            print(f"{name:8} {on:7.1f} us on, {off:5.1f} us off")
        queue = tracer.queue  # type: ignore[attr-defined]
        print(f"{queue.exported} spans exported, {sum(queue.dropped.values())} dropped")
        tracer.close()


if __name__ == "__main__":
    main()
