"""gRPC side of the draft: the Propose stream and GetDraftInfo."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import grpc

from draft_service.session import Limits, Session
from tandem.draft.v1 import draft_pb2 as pb
from tandem.draft.v1 import draft_pb2_grpc as rpc
from tandem.lm.proposers import Proposer
from tandem.tracing import NULL_TRACER, Tracer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counters:
    """What a draft has done since its start, and what it holds now."""

    engines: int
    sequences: int
    questions: int
    drafted_tokens: int
    busy_s: float


class DraftServicer(rpc.DraftServiceServicer):
    """One session per stream; all share the proposer."""

    def __init__(
        self,
        proposer: Proposer,
        names: tuple[str, ...],
        epoch: int,
        limits: Limits,
        vocab_size: int = 0,
        executor: Executor | None = None,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        """executor: one thread in which answers are computed if they take long (a model); None: in the loop."""
        self._proposer = proposer
        self._names = names
        self._epoch = epoch
        self._limits = limits
        self._vocab_size = vocab_size
        self._executor = executor
        self._tracer = tracer
        self._sessions: set[Session] = set()
        self._questions = 0
        self._drafted = 0
        self._busy_us = 0

    async def Propose(
        self, request_iterator: AsyncIterator[pb.ProposeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.ProposeResponse]:
        session = self._session()
        self._sessions.add(session)
        log.info("engine connected")
        try:
            async for question in request_iterator:
                self._questions += 1
                if self._executor is None:
                    response = session.answer(question)
                else:
                    loop = asyncio.get_running_loop()
                    response = await loop.run_in_executor(self._executor, session.answer, question)
                # The engine waits for this; what can wait comes after.
                yield response
                self._drafted += sum(len(proposal.draft_ids) for proposal in response.proposals)
                self._busy_us += response.elapsed_us
                self._later(session.tidy)
        finally:
            self._sessions.discard(session)
            self._later(session.close)
            log.info("engine disconnected")

    def _session(self) -> Session:
        if not self._tracer.on:
            return Session(self._proposer, self._epoch, self._limits)
        from draft_service.tracing import TracedSession

        return TracedSession(self._proposer, self._epoch, self._limits, self._tracer)

    @property
    def counters(self) -> Counters:
        return Counters(
            engines=len(self._sessions),
            sequences=sum(len(session) for session in self._sessions),
            questions=self._questions,
            drafted_tokens=self._drafted,
            busy_s=self._busy_us / 1e6,
        )

    def _later(self, work: Callable[[], None]) -> None:
        """Runs it where proposers are called: one thread, in order."""
        if self._executor is None:
            work()
        else:
            self._executor.submit(work)

    async def GetDraftInfo(
        self, request: pb.GetDraftInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetDraftInfoResponse:
        return pb.GetDraftInfoResponse(
            epoch=self._epoch,
            proposers=self._names,
            vocab_size=self._vocab_size,
            sequences=sum(len(session) for session in self._sessions),
            questions=self._questions,
            rss_bytes=rss_bytes(),
        )


def rss_bytes() -> int:
    """Resident set of this process; the peak where the system tells no current value."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
