"""A RouterAdminService with a fleet and decisions that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from tandem import rpc
from tandem.engine.v1 import engine_pb2 as epb
from tandem.errors import TandemError, abort
from tandem.inference.v1 import inference_pb2 as pb
from tandem.router.v1 import router_pb2 as rpb
from tandem.router.v1 import router_pb2_grpc

EPOCH = 0x1234


def engine(name: str, state: int = rpb.FLEET_STATE_READY, **load: Any) -> rpb.EngineView:
    """An engine that has reported."""
    report = epb.WatchLoadResponse(
        epoch=EPOCH,
        state=epb.ENGINE_STATE_READY,
        model=pb.ModelInfo(name="toy", numerics_id="n1", batch_invariant=True),
        kv_blocks_total=100,
        **load,
    )
    return rpb.EngineView(address=f"unix:/run/{name}.sock", state=state, load=report, report_age_ms=7)


def decision(request_id: str, chosen: str = "unix:/run/engine-0.sock") -> rpb.RouteDecision:
    return rpb.RouteDecision(
        request_id=request_id,
        unix_ms=1_700_000_000_000,
        policy="prefix_exact",
        chosen=chosen,
        reason="holds 32 prompt tokens; 1 other considered",
        candidates=[
            rpb.RouteCandidate(address=chosen, matched_blocks=2, predicted_ms=4.5, parts={"prefill": 4.5}),
            rpb.RouteCandidate(address="unix:/run/engine-1.sock", excluded="draining"),
        ],
        prompt_tokens=40,
        actual_cached_tokens=32,
        outcome="ok",
        queued_ms=1.25,
        ttft_ms=9.0,
        attempt=1,
    )


class MockAdmin(router_pb2_grpc.RouterAdminServiceServicer):
    """See the module."""

    def __init__(self) -> None:
        self.engines: list[rpb.EngineView] = []
        self.decisions: list[rpb.RouteDecision] = []
        self.explained: list[pb.GenerateRequest] = []
        self.calls = 0
        self.followers: set[asyncio.Queue[rpb.RouteDecision]] = set()

    async def ListEngines(self, request: Any, context: grpc.aio.ServicerContext) -> rpb.ListEnginesResponse:
        self.calls += 1
        return rpb.ListEnginesResponse(engines=self.engines, queued=3, shed=5)

    async def ExplainRoute(
        self, request: rpb.ExplainRouteRequest, context: grpc.aio.ServicerContext
    ) -> rpb.ExplainRouteResponse:
        self.explained.append(request.request)
        if not self.engines:
            await abort(context, TandemError("NO_ENGINE", "no engine serves it", retry_after_s=2))
        return rpb.ExplainRouteResponse(decision=decision(request.request.request_id))

    async def WatchRoutes(
        self, request: rpb.WatchRoutesRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rpb.WatchRoutesResponse]:
        queue: asyncio.Queue[rpb.RouteDecision] = asyncio.Queue()
        self.followers.add(queue)
        try:
            if request.last and self.decisions:
                yield rpb.WatchRoutesResponse(decisions=self.decisions[-request.last :])
            while request.follow:
                yield rpb.WatchRoutesResponse(decisions=[await queue.get()])
        finally:
            self.followers.discard(queue)

    async def decide(self, one: rpb.RouteDecision) -> None:
        for queue in self.followers:
            queue.put_nowait(one)


async def start(address: str = "127.0.0.1:0") -> tuple[grpc.aio.Server, MockAdmin, int]:
    """A running server, its servicer and its port."""
    server, _ = rpc.server()
    servicer = MockAdmin()
    router_pb2_grpc.add_RouterAdminServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, servicer, port
