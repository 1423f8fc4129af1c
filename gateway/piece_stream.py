"""A chat of one choice as a stream of pieces, for the dialects that number blocks or items."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gateway.chat_job import ChatJob, final_finish
from gateway.context import Gateway, RequestContext
from gateway.generation import finish_reason
from gateway.text import account
from gateway.tools.base import CallArgs, CallStart, Content, Piece
from tandem.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class End:
    """How the choice ended, after its last piece."""

    reason: str
    finished: pb.Finished
    usage: pb.Usage


async def pieces_of(job: ChatJob, gateway: Gateway, context: RequestContext) -> AsyncIterator[list[Piece] | End]:
    """Pieces as they come, then one End. Books the usage. Raises ApiError."""
    parser = job.plan.make_parser(job.prompt)
    context.engine = job.generation.accepted.engine
    finished, usage = pb.Finished(), pb.Usage()
    calls, arguments = 0, ""
    last: float | None = None
    while (events := await job.generation.read()) is not None:
        pieces: list[Piece] = []
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "delta":
                now = time.monotonic()
                if last is None:
                    context.first_token()
                else:
                    gateway.metrics.itl.labels(context.model).observe(now - last)
                last = now
                text = event.delta.text
                if text:
                    pieces += parser.feed(text) if parser is not None else [Content(text)]
            elif kind == "finished":
                finished = event.finished
                pieces += parser.finish() if parser is not None else []
            elif kind == "usage":
                usage = event.usage
        if job.body.parallel_tool_calls is False:
            pieces = [p for p in pieces if not (isinstance(p, (CallStart, CallArgs)) and p.index > 0)]
        for piece in pieces:
            if isinstance(piece, CallStart):
                calls, arguments = calls + 1, ""
            elif isinstance(piece, CallArgs):
                arguments += piece.text
        if pieces:
            yield pieces
    reason = final_finish(finish_reason(finished), calls, job.plan, arguments)
    account(gateway, context, [usage], [reason])
    yield End(reason, finished, usage)
