"""EngineService: what routers and operators ask of one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil

from engine_service.engine import Engine
from engine_service.service import Host, model_info
from engine_service.settings import EngineSettings
from tandem.engine.v1 import engine_pb2, engine_pb2_grpc
from tandem.errors import TandemError, abort, invalid

Context = grpc.aio.ServicerContext[Any, Any]

_DEFAULT_INTERVAL_MS = 250
_RSS_EVERY_S = 1.0


class LoadReporter:
    """Builds load reports; the resident set is read at most once a second."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._process = psutil.Process()
        self._rss = (0.0, 0)

    def rss(self) -> int:
        now = time.monotonic()
        if now - self._rss[0] > _RSS_EVERY_S or not self._rss[1]:
            self._rss = now, self._process.memory_info().rss
        return self._rss[1]

    def report(self, engine: Engine | None, sequence: int) -> engine_pb2.WatchLoadResponse:
        if engine is None:
            state = engine_pb2.ENGINE_STATE_STARTING
            return engine_pb2.WatchLoadResponse(sequence=sequence, state=state, rss_bytes=self.rss())
        stats, spec = engine.stats, engine.runner.spec
        return engine_pb2.WatchLoadResponse(
            epoch=engine.epoch,
            sequence=sequence,
            state=engine.state,
            running=stats.running,
            waiting=stats.queued,
            uncached_waiting_tokens=stats.uncached_waiting_tokens,
            kv_blocks_used=stats.blocks_used,
            kv_blocks_total=spec.num_blocks,
            kv_blocks_cached=stats.blocks_cached,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_step_ms=stats.decode_step_ms,
            draft_acceptance=stats.draft_acceptance,
            steps=stats.steps,
            work_pending=stats.work_pending,
            longest_step_ms=stats.longest_step_ms,
            model=model_info(engine),
            max_num_seqs=self._settings.max_num_seqs,
            max_waiting=self._settings.max_waiting,
            output_tokens=stats.output_tokens,
            prefill_tokens=stats.prefill_tokens,
            cached_tokens=stats.cached_tokens,
            drafts_proposed=stats.drafts_proposed,
            drafts_accepted=stats.drafts_accepted,
            rss_bytes=self.rss(),
            last_error=stats.last_error,
            preemptions=stats.preemptions,
        )


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Load, cache events, drain, reset."""

    def __init__(self, host: Host, settings: EngineSettings) -> None:
        self._host = host
        self._settings = settings
        self._reporter = LoadReporter(settings)
        self._ending: set[asyncio.Task[bool]] = set()

    async def WatchLoad(
        self, request: engine_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[engine_pb2.WatchLoadResponse]:
        interval = request.interval_ms or _DEFAULT_INTERVAL_MS
        if not 50 <= interval <= 10_000:
            await abort(context, invalid("interval_ms", interval, "must be 0 or from 50 to 10000"))
        sequence = 0
        while True:
            sequence += 1
            yield self._reporter.report(self._host.engine, sequence)
            await asyncio.sleep(interval / 1000)

    async def SubscribeKvEvents(
        self, request: engine_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[engine_pb2.SubscribeKvEventsResponse]:
        try:
            engine = self._host.ready()
        except TandemError as error:
            await abort(context, error)
        async for message in engine.kv_log.subscribe(request.epoch, request.last_number):
            yield message

    async def Drain(self, request: engine_pb2.DrainRequest, context: Context) -> engine_pb2.DrainResponse:
        try:
            engine = self._host.ready()
        except TandemError as error:
            await abort(context, error)
        remaining = engine.drain(cancel=request.cancel)
        if not request.cancel:
            grace = request.grace_ms / 1000 if request.grace_ms else self._settings.grace
            task = asyncio.create_task(engine.drained(grace))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        else:
            for task in self._ending:
                task.cancel()
        return engine_pb2.DrainResponse(remaining=remaining, state=engine.state)

    async def ResetPrefixCache(
        self, request: engine_pb2.ResetPrefixCacheRequest, context: Context
    ) -> engine_pb2.ResetPrefixCacheResponse:
        try:
            engine = self._host.ready()
        except TandemError as error:
            await abort(context, error)
        removed = await asyncio.wrap_future(engine.loop.call(engine.loop.scheduler.pool.reset))
        return engine_pb2.ResetPrefixCacheResponse(removed_blocks=removed)
