"""The engine on the event loop: opens streams, feeds the step loop, turns its reports into events, watches over it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING

from engine_service import traffic
from engine_service.admission import check_fits
from engine_service.grammar import GrammarCompiler, GrammarMatcher
from engine_service.jobs import StepReport
from engine_service.kv_events import KvEventLog
from engine_service.loop import StepLoop
from engine_service.opening import Openings
from engine_service.output import Identity, Stream, prompt_event
from engine_service.policy import SchedulerConfig, prefill_budget
from engine_service.scheduler import Scheduler
from engine_service.settings import EngineSettings
from engine_service.speculation import SpeculationController
from engine_service.stats import LoopStats
from engine_service.validate import Limits, Validated
from engine_service.watchdog import TICK_S, Watchdog
from tandem.engine.v1 import engine_pb2
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.lm.block_pool import BlockPool
from tandem.lm.types import Runner
from tandem.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine_service.metrics import EngineMetrics

log = logging.getLogger(__name__)

READY, DRAINING, STUCK = (
    engine_pb2.ENGINE_STATE_READY,
    engine_pb2.ENGINE_STATE_DRAINING,
    engine_pb2.ENGINE_STATE_STUCK,
)


class Engine:
    """One loaded model at work. Everything but the step loop's thread runs on one event loop."""

    def __init__(
        self,
        settings: EngineSettings,
        runner: Runner,
        tokenizer: Tokenizer,
        speculation: SpeculationController,
        names: tuple[str, ...],
    ) -> None:
        spec = runner.spec
        self.settings = settings
        self.runner = runner
        self.tokenizer = tokenizer
        self.names = names
        self.epoch = secrets.randbits(63) + 1
        self.started_unix_s = int(time.time())
        self.state = READY
        self.identity = Identity(
            epoch=self.epoch,
            engine=settings.engine_name or settings.listen,
            model=names[0],
            numerics_id=spec.numerics_id,
            batch_invariant=spec.batch_invariant,
            kernel_path=spec.kernel_path,
        )
        self.max_model_len = context_limit(
            settings.max_model_len, spec.max_model_len, spec.num_blocks * spec.block_size
        )
        self.limits = Limits(
            vocab_size=spec.vocab_size,
            max_model_len=self.max_model_len,
            max_n=min(settings.max_n, settings.max_num_seqs),
            max_logprobs=settings.max_logprobs,
            model_stop_ids=tuple(tokenizer.stop_token_ids),
        )
        self.kv_log = KvEventLog(self.epoch, spec.block_size, spec.model_digest)
        self.grammars = GrammarCompiler(
            tokenizer,
            spec.vocab_size,
            max_bytes=settings.grammar_max_bytes,
            timeout_s=settings.grammar_timeout_s,
        )
        config = SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            prefill_chunk=settings.prefill_chunk,
            policy=settings.scheduling_policy,
            priority_age_s=settings.priority_age_s,
            prefill_budget=prefill_budget(settings.prefill_budget, spec.kernel_path),
        )
        pool = BlockPool(spec.num_blocks, spec.block_size, caching=settings.prefix_caching)
        hold = settings.stream_interval_ms / 1000
        self.loop = StepLoop(runner, Scheduler(config, pool), speculation, self._sink, hold=hold)
        self.speculation = speculation
        # Set where metrics are served.
        self.metrics: EngineMetrics | None = None
        # Raises OSError if its directory cannot be used.
        self.traffic = traffic.open_log(settings, spec, tokenizer.bundle.digest)
        self.streams: dict[int, Stream] = {}
        self._openings = Openings(settings, tokenizer, self.identity, self.kv_log)
        self._events: asyncio.AbstractEventLoop | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def stats(self) -> LoopStats:
        return self.loop.stats

    def start(self) -> None:
        """Starts the step thread. Call on the event loop."""
        self._events = asyncio.get_running_loop()
        self.loop.start()
        self.grammars.warm()

    async def close(self, patience_s: float = 5.0) -> bool:
        """Ends all streams and the step thread. False if a step still runs after `patience_s`: it is left behind."""
        self.end_streams(TandemError("ENGINE_DRAINING", "the engine is shutting down"))
        self.kv_log.close()
        self.grammars.close()
        if self.traffic is not None:
            await asyncio.to_thread(self.traffic.close)
        if not await asyncio.to_thread(self.loop.stop, patience_s):
            log.warning("a step still runs; leaving it behind")
            return False
        self.runner.close()
        stats = getattr(self.speculation, "stats", None)
        if stats is not None:
            log.info("speculation", extra=stats.summary())
        return True

    # Streams

    def check_accepts(self) -> None:
        """Raises if no new request may come in: ENGINE_DRAINING, NO_ENGINE (a step hangs) or ENGINE_FULL."""
        if self.state == DRAINING:
            raise TandemError("ENGINE_DRAINING", "the engine is draining", retry_after_s=1.0)
        if self.state == STUCK:
            raise TandemError("NO_ENGINE", "the engine is stuck in a step", retry_after_s=5.0)
        stats = self.stats
        room = max(0, self.settings.max_num_seqs - stats.seats) + self.settings.max_waiting
        if stats.queued >= room:
            raise TandemError(
                "ENGINE_FULL",
                f"{stats.queued} requests wait already and {stats.running} sequences run",
                retry_after_s=1.0,
                max_waiting=self.settings.max_waiting,
                max_num_seqs=self.settings.max_num_seqs,
            )

    def open(
        self,
        message: pb.GenerateRequest,
        valid: Validated,
        grammar: GrammarMatcher | None,
        arrival: float,
        trace: str = "",
    ) -> Stream:
        """Queues a validated request; its first event waits in the stream's outbox when this returns.

        trace: traceparent for the draft's span.

        Raises:
            TandemError: the engine takes no more, the request never fits, or its resume state contradicts itself.
        """
        self.check_accepts()
        check_fits(len(valid.prompt), valid.max_output, self.loop.scheduler.pool)
        opened = self._openings.open(message, valid, grammar, arrival, trace)
        request, stream = opened.job.request, opened.stream
        self.streams[request.id] = stream
        self._empty.clear()
        stream.apply(opened.ended, self.identity)
        if request.unfinished:
            self.loop.submit(opened.job)
        return stream

    def close_stream(self, stream: Stream) -> None:
        """The call is over, for whatever reason. What still runs is cancelled before the next step."""
        known = self.streams.pop(stream.request.id, None)
        if known is not None and self.metrics is not None:
            self.metrics.closed(stream)
        if known is not None and self.traffic is not None and (entry := traffic.entry(stream)) is not None:
            self.traffic.offer(entry)
        if not stream.done:
            self.loop.cancel(stream.request.id)
        if not self.streams:
            self._empty.set()

    def end_streams(self, error: TandemError) -> None:
        for stream in list(self.streams.values()):
            if not stream.done:
                self.loop.cancel(stream.request.id)
                stream.outbox.fail(error)

    # Reports of the step loop

    def _sink(self, report: StepReport) -> None:
        if self._events is not None and not self._events.is_closed():
            self._events.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: StepReport) -> None:
        self.kv_log.apply(report.changes)
        for job in report.jobs:
            stream = self.streams.get(job.request.id)
            if stream is None:
                continue
            if job.prompt_scores is not None:
                stream.outbox.put(prompt_event(job.request.prompt[0], job.prompt_scores))
            if self.metrics is not None and job.updates:
                self.metrics.delivered(stream, job.times)
            if not stream.apply(job.updates, self.identity):
                self.loop.cancel(job.request.id)
            elif job.error is not None:
                stream.outbox.fail(job.error)

    # Life

    def drain(self, *, cancel: bool = False) -> int:
        """Stops (or restarts) taking requests. Returns how many are left."""
        if self.state != STUCK:
            self.state = READY if cancel else DRAINING
        return len(self.streams)

    async def drained(self, grace: float) -> bool:
        """Waits until nothing is left; after `grace` seconds ends what is. True if nothing had to be ended."""
        try:
            await asyncio.wait_for(self._empty.wait(), grace)
            return True
        except TimeoutError:
            if self.state == DRAINING:
                self.end_streams(
                    TandemError("ENGINE_DRAINING", f"the engine was drained and {grace} s of grace are over")
                )
            return False

    async def watch(self, on_stuck: asyncio.Event, on_recovered: asyncio.Event) -> None:
        """Sets `on_stuck` when a step hangs, and `on_recovered` when it has ended after all. Runs until cancelled."""
        before, watchdog = self.state, Watchdog(self.stats, self.settings.stall_limit)
        while True:
            await asyncio.sleep(TICK_S)
            hung = watchdog.look()
            if hung and self.state != STUCK:
                before, self.state = self.state, STUCK
                self.stats.last_error = f"a step has run for more than {watchdog.limit_s:.1f} s"
                log.error(self.stats.last_error)
                self.end_streams(TandemError("NO_ENGINE", "the engine is stuck in a step", retry_after_s=5.0))
                on_stuck.set()
            elif not hung and self.state == STUCK:
                self.state = before
                log.warning("the step that hung has ended; taking requests again")
                on_recovered.set()


def context_limit(wanted: int, trained: int, pool_tokens: int) -> int:
    """Longest prompt plus output. 0: what both the model and the KV pool hold.

    Raises:
        ValueError: more is wanted than the pool holds, so that no request could ever reach it.
    """
    if wanted > pool_tokens:
        raise ValueError(
            f"max_model_len is {wanted}, but the KV cache holds {pool_tokens} tokens: raise kv_cache_bytes or lower it"
        )
    return wanted or min(trained, pool_tokens)
