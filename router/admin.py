"""RouterAdminService: looking into a router and steering it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc

from router.admission import Job
from router.policies import Candidate
from router.recorder import explain
from router.requests import make_query
from router.service import InferenceServicer
from router.settings import POLICIES
from tandem.errors import TandemError, abort, invalid
from tandem.router.v1 import router_pb2 as rpb
from tandem.router.v1 import router_pb2_grpc

SERVICE = "tandem.router.v1.RouterAdminService"
MAX_LAST = 1000


class AdminServicer(router_pb2_grpc.RouterAdminServiceServicer):
    """The admin view of one router."""

    def __init__(self, inference: InferenceServicer) -> None:
        self._inference = inference
        self._fleet = inference.fleet

    async def ListEngines(
        self, request: rpb.ListEnginesRequest, context: grpc.aio.ServicerContext
    ) -> rpb.ListEnginesResponse:
        engines = sorted(self._fleet.engines.values(), key=lambda engine: engine.address)
        admission = self._inference.admission
        return rpb.ListEnginesResponse(
            engines=[engine.view() for engine in engines], queued=len(admission), shed=admission.shed
        )

    async def ExplainRoute(
        self, request: rpb.ExplainRouteRequest, context: grpc.aio.ServicerContext
    ) -> rpb.ExplainRouteResponse:
        try:
            return rpb.ExplainRouteResponse(decision=self._explain(request))
        except TandemError as error:
            await abort(context, error)

    def _explain(self, request: rpb.ExplainRouteRequest) -> rpb.RouteDecision:
        query = make_query(request.request)
        model = self._fleet.resolve(request.request.model)
        job = Job(model=model, query=query)
        now, policy = time.monotonic(), self._fleet.policy
        engines = self._inference.admission.eligible(job)
        candidates = policy.rank(query, [engine.load for engine in engines], now) if engines else []
        decision = rpb.RouteDecision(
            request_id=query.request_id,
            unix_ms=int(time.time() * 1000),
            policy=policy.name,
            prompt_tokens=query.prompt_tokens,
            attempt=1,
            reason="no engine has room: the request would wait",
        )
        if candidates:
            best = min(candidates, key=lambda candidate: candidate.cost_s)
            decision.chosen = best.engine.name
            decision.reason = explain(best, candidates, policy.name)
        for candidate in candidates:
            decision.candidates.append(_candidate(candidate))
        taken = {candidate.engine.name for candidate in candidates}
        for engine in self._fleet.serving(model):
            if engine.address not in taken:
                why = engine.excluded(now) or ("not in the sample" if engine in engines else "full")
                decision.candidates.add(address=engine.address, excluded=why)
        decision.candidates.sort(key=lambda candidate: candidate.address)
        return decision

    async def WatchRoutes(
        self, request: rpb.WatchRoutesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.WatchRoutesResponse]:
        if request.last > MAX_LAST:
            await abort(context, invalid("last", request.last, f"at most {MAX_LAST} are kept"))
        recorder = self._inference.recorder
        queue = recorder.follow()
        try:
            old = recorder.last(request.last)
            if old:
                yield rpb.WatchRoutesResponse(decisions=[decision.to_proto() for decision in old])
            while request.follow:
                decision = await queue.get()
                yield rpb.WatchRoutesResponse(decisions=[decision.to_proto()])
        finally:
            recorder.unfollow(queue)

    async def GetRoutingConfig(
        self, request: rpb.GetRoutingConfigRequest, context: grpc.aio.ServicerContext
    ) -> rpb.GetRoutingConfigResponse:
        return rpb.GetRoutingConfigResponse(config=self._config())

    def _config(self) -> rpb.RoutingConfig:
        live = self._fleet.live
        return rpb.RoutingConfig(
            policy=self._fleet.policy.name,
            max_retries=live.max_retries,
            stall_limit_ms=int(live.stall_limit_s * 1000),
            max_queued=live.max_queued,
        )

    async def UpdateRoutingConfig(
        self, request: rpb.UpdateRoutingConfigRequest, context: grpc.aio.ServicerContext
    ) -> rpb.UpdateRoutingConfigResponse:
        config, live = request.config, self._fleet.live
        if config.HasField("policy") and config.policy not in POLICIES:
            await abort(context, invalid("policy", config.policy, f"known are {', '.join(POLICIES)}"))
        if config.HasField("max_retries") and config.max_retries > 10:
            await abort(context, invalid("max_retries", config.max_retries, "at most 10 are allowed"))
        if config.HasField("stall_limit_ms") and config.stall_limit_ms == 0:
            await abort(context, invalid("stall_limit_ms", 0, "it must be above 0"))
        if config.HasField("policy"):
            self._fleet.set_policy(config.policy)
        if config.HasField("max_retries"):
            live.max_retries = config.max_retries
        if config.HasField("stall_limit_ms"):
            live.stall_limit_s = config.stall_limit_ms / 1000
        if config.HasField("max_queued"):
            live.max_queued = config.max_queued
        return rpb.UpdateRoutingConfigResponse(config=self._config())


def _candidate(candidate: Candidate) -> rpb.RouteCandidate:
    return rpb.RouteCandidate(
        address=candidate.engine.name,
        matched_blocks=candidate.matched_blocks,
        predicted_ms=candidate.predicted_s * 1000,
        parts={name: seconds * 1000 for name, seconds in candidate.parts.items()},
    )
