"""One engine as the router sees it: its channel, health, load reports, KV events and failures."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.attempt import Attempt
from router.index import PrefixIndex
from router.kv_feed import KvFeed, Verdict
from router.load import EngineLoad, LoadReport
from router.outlier import Outlier
from router.policies import Policy
from router.settings import RouterSettings
from tandem import rpc
from tandem.engine.v1 import engine_pb2 as epb
from tandem.engine.v1 import engine_pb2_grpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.many import ManyClient
from tandem.router.v1 import router_pb2 as rpb

log = logging.getLogger("router.engine")

INFERENCE = "/tandem.inference.v1.InferenceService/"
FIRST_STEP_PATIENCE = 3
# Between tries to reach an engine that does not answer.
RECONNECT_S = (0.1, 2.0)
# An engine without KV events is asked again so seldom.
NO_EVENTS_RETRY_S = 30.0


class Engine:
    """Everything about one address. `changed` is called whenever something that matters to routing has changed."""

    def __init__(
        self,
        address: str,
        settings: RouterSettings,
        index: PrefixIndex,
        policy: Callable[[], Policy],
        changed: Callable[[Engine], None],
        token: str = "",
    ) -> None:
        self.address = address
        self._settings = settings
        self._policy = policy
        self._changed = changed
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.feed = KvFeed(index)
        self.load = EngineLoad(address, self.feed.slot)
        self.model: pb.ModelInfo | None = None
        self.last: epb.WatchLoadResponse | None = None
        self.connected = False
        self.serving = True
        self.hung = ""
        self.draining_here = False
        self.delisted = False
        self.outlier = Outlier(settings.eject_failures, settings.eject_s)
        self.last_error = ""
        self.attempts: set[Attempt] = set()
        self._steps_at = 0.0
        self._stuck_steps = -1
        self._tasks: list[asyncio.Task[None]] = []
        self._open()
        policy().add(self.load)

    # -- connection

    def _open(self) -> None:
        self.channel = rpc.channel(self.address)
        # Without serializers: these are calls with bytes.
        self.generate = ManyClient(self.channel, self._metadata)
        self.embed: Any = self.channel.unary_unary(INFERENCE + "Embed")
        self.tokenizer: Any = self.channel.unary_unary(INFERENCE + "GetTokenizer")
        self._stub = engine_pb2_grpc.EngineServiceStub(self.channel)

    def start(self) -> None:
        self.generate.start()
        for watch in (self._watch_load, self._watch_health, self._watch_events):
            self._tasks.append(asyncio.create_task(self._forever(watch)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.give_up_all("the router forgot this engine")
        self._policy().remove(self.load)
        self.feed.close()
        await self.generate.close()
        await self.channel.close()

    async def _forever(self, watch: Callable[[], Any]) -> None:
        pause = RECONNECT_S[0]
        while True:
            began = time.monotonic()
            try:
                await watch()
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    pause = NO_EVENTS_RETRY_S
            except ValueError as error:
                log.warning("engine sent nonsense", extra={"engine": self.address, "error": str(error)})
            if time.monotonic() - began > 5.0:
                pause = RECONNECT_S[0]
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = pause if pause >= NO_EVENTS_RETRY_S else min(pause * 2, RECONNECT_S[1])

    # -- what the engine tells

    async def _watch_load(self) -> None:
        request = epb.WatchLoadRequest(interval_ms=self._settings.load_interval_ms)
        try:
            async for report in self._stub.WatchLoad(request, metadata=self._metadata, wait_for_ready=False):
                self._report(report)
        except grpc.aio.AioRpcError as error:
            self.last_error = error.details() or str(error.code())
            raise
        finally:
            self._lost()

    def _report(self, report: epb.WatchLoadResponse) -> None:
        now = time.monotonic()
        old = self.last
        if old is None or report.epoch != old.epoch:
            self._new_process(report, now)
        elif report.steps != old.steps or not report.work_pending or not old.work_pending:
            self._steps_at = now
        if self.hung and (report.steps != self._stuck_steps or not report.work_pending):
            log.info("engine moves again", extra={"engine": self.address})
            self.hung = ""
        if not self.connected and not self.failures:
            self.last_error = ""
        self.last, self.connected, self.draining_here = report, True, False
        if report.HasField("model"):
            self.model = report.model
            self.load.block_size = report.model.block_size or self.load.block_size
            self.load.max_model_len = report.model.max_model_len
        self.load.update(LoadReport.of(report), now)
        self._changed(self)

    def _new_process(self, report: epb.WatchLoadResponse, now: float) -> None:
        if self.last is not None:
            log.info("engine restarted", extra={"engine": self.address, "epoch": report.epoch})
            self._policy().remove(self.load)
            # The new process's snapshot may have come before its first load report.
            if self.feed.epoch != report.epoch:
                self.feed.reset()
            self.load.slot, self.load.events_live = self.feed.slot, self.feed.live
            self._policy().add(self.load)
        self.outlier.reset()
        self.hung, self._steps_at = "", now

    def _move_slot(self) -> None:
        """The feed has a new bit in the index: predictions under the old one are void."""
        if self.load.slot != self.feed.slot:
            self._policy().remove(self.load)
            self.load.slot = self.feed.slot
            self._policy().add(self.load)
        self.load.events_live = self.feed.live

    def _lost(self) -> None:
        if self.connected:
            self.connected = False
            log.info("engine lost", extra={"engine": self.address, "error": self.last_error})
            self._changed(self)

    async def _watch_health(self) -> None:
        stub = health_pb2_grpc.HealthStub(self.channel)
        async for answer in stub.Watch(health_pb2.HealthCheckRequest(), metadata=self._metadata):
            serving = answer.status == health_pb2.HealthCheckResponse.SERVING
            if serving != self.serving:
                self.serving = serving
                self._changed(self)

    async def _watch_events(self) -> None:
        epoch, number = self.feed.resume_point()
        call = self._stub.SubscribeKvEvents(
            epb.SubscribeKvEventsRequest(epoch=epoch, last_number=number), metadata=self._metadata
        )
        try:
            async for message in call:
                verdict = self.feed.apply(message)
                self._move_slot()
                if verdict is Verdict.RESUBSCRIBE:
                    log.info("KV events have a gap: asking for a snapshot", extra={"engine": self.address})
                    return
        except ValueError:
            self.feed.reset()
            self._move_slot()
            raise
        finally:
            call.cancel()
            self.feed.interrupted()

    # -- judging

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return self.outlier.failures

    @property
    def state(self) -> rpb.FleetState:
        """Its FleetState now."""
        report = self.last
        if report is None:
            return rpb.FLEET_STATE_DOWN if self.last_error and self.failures else rpb.FLEET_STATE_STARTING
        if not self.connected or self.hung or report.state == epb.ENGINE_STATE_STUCK:
            return rpb.FLEET_STATE_DOWN
        if report.state == epb.ENGINE_STATE_STARTING:
            return rpb.FLEET_STATE_STARTING
        if report.state == epb.ENGINE_STATE_DRAINING or self.draining_here or self.delisted:
            return rpb.FLEET_STATE_DRAINING
        if self.outlier.suspect or not self.serving:
            return rpb.FLEET_STATE_SUSPECT
        return rpb.FLEET_STATE_READY

    def excluded(self, now: float) -> str:
        """Why nothing may be sent there now; empty if it may. A suspect engine takes one probe after its rest."""
        state = self.state
        if state == rpb.FLEET_STATE_READY:
            return ""
        if state == rpb.FLEET_STATE_SUSPECT and self.serving and self.outlier.may_probe(now):
            return ""
        return rpb.FleetState.Name(state).removeprefix("FLEET_STATE_").lower()

    def check_hung(self, now: float, late_s: float, stall_limit_s: float) -> None:
        """Declares the engine hung if its step counter or its reports stand still.

        Args:
            late_s: how late this check is; the router's own pauses are no fault of the engine.
            stall_limit_s: what is tolerated, but never under three times the engine's longest step.
        """
        report = self.last
        if report is None or not self.connected or self.hung:
            return
        self._steps_at += late_s
        self.load.reported_at += late_s
        # The first step of a process may load and compile; there is no longest step to go by yet.
        limit = max(stall_limit_s, 3 * report.longest_step_ms / 1000) * (1 if report.steps else FIRST_STEP_PATIENCE)
        if report.work_pending and now - self._steps_at >= limit:
            self._declare_hung(f"no step for {now - self._steps_at:.1f} s while work is pending")
        elif now - self.load.reported_at >= limit:
            self._declare_hung(f"no load report for {now - self.load.reported_at:.1f} s")

    def _declare_hung(self, reason: str) -> None:
        log.warning("engine hangs", extra={"engine": self.address, "reason": reason})
        self.hung = self.last_error = reason
        self._stuck_steps = self.last.steps if self.last else -1
        # When it moves again it is suspect: one probe must succeed before it gets work as usual.
        self.outlier.condemn(time.monotonic())
        self.give_up_all(reason)
        self._changed(self)

    def give_up_all(self, reason: str) -> None:
        for attempt in tuple(self.attempts):
            attempt.give_up(reason)

    def began(self) -> None:
        """A request is sent; to a suspect engine it is the probe."""
        if self.state == rpb.FLEET_STATE_SUSPECT:
            self.outlier.probe()

    def succeeded(self) -> None:
        self.outlier.succeeded()

    def failed(self, reason: str) -> None:
        """Counts a failure that is the engine's fault."""
        self.last_error = reason
        self.outlier.failed(time.monotonic())

    def ended(self) -> None:
        """A request ended without saying anything about the engine."""
        self.outlier.ended()

    def metadata(self, request_id: str = "") -> tuple[tuple[str, str], ...]:
        """Call metadata: the services' token, and the id for the engine's log."""
        return (*self._metadata, ("x-request-id", request_id)) if request_id else self._metadata

    def view(self) -> rpb.EngineView:
        now = time.monotonic()
        age = max(0, int((now - self.load.reported_at) * 1000)) if self.last else 0
        return rpb.EngineView(
            address=self.address,
            state=self.state,
            load=self.last,
            report_age_ms=age,
            in_flight=self.load.in_flight,
            consecutive_failures=self.failures,
            last_error=self.last_error or (self.last.last_error if self.last else ""),
            indexed_blocks=self.feed.indexed(),
            events_live=self.feed.live,
        )
