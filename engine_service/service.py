"""InferenceService of one engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from engine_service.engine import Engine
from engine_service.output import Stream
from engine_service.tracing import TracedRequest, embedded
from engine_service.validate import MAX_NAME_BYTES, Validated, check_envelope, validate
from tandem.errors import TandemError, abort, invalid
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc as pb_grpc
from tandem.many import CallContext, ManyServer
from tandem.tracing import NULL_TRACER, Tracer, grpc_status

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Host:
    """Where the servicers find the engine; empty while the model loads."""

    def __init__(self) -> None:
        self.engine: Engine | None = None

    def ready(self) -> Engine:
        """Raises NO_ENGINE while the model loads."""
        if self.engine is None:
            raise TandemError("NO_ENGINE", "the engine is loading its model", retry_after_s=1.0)
        return self.engine


def model_info(engine: Engine) -> pb.ModelInfo:
    spec = engine.runner.spec
    return pb.ModelInfo(
        name=engine.names[0],
        aliases=engine.names[1:],
        model_digest=spec.model_digest,
        tokenizer_digest=engine.tokenizer.bundle.digest,
        max_model_len=engine.max_model_len,
        vocab_size=spec.vocab_size,
        numerics_id=spec.numerics_id,
        batch_invariant=spec.batch_invariant,
        architecture=spec.architecture,
        created_unix_s=engine.started_unix_s,
        hidden_size=spec.hidden_size,
        max_n=engine.limits.max_n,
        max_logprobs=engine.limits.max_logprobs,
        block_size=spec.block_size,
        stop_token_ids=engine.tokenizer.stop_token_ids,
    )


def _check_model(engine: Engine, name: str) -> None:
    if name and name not in engine.names:
        served = ", ".join(engine.names)
        raise TandemError(
            "MODEL_NOT_FOUND", f"model {name!r} is not served here; served: {served}", model=name, served=served
        )


def _check_digest(engine: Engine, digest: str) -> None:
    own = engine.tokenizer.bundle.digest
    if digest and digest != own:
        raise TandemError(
            "TOKENIZER_MISMATCH",
            f"the request was tokenized by {digest}, but this engine has {own}",
            given=digest,
            own=own,
        )


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Generate and what goes with it."""

    def __init__(self, host: Host, tracer: Tracer = NULL_TRACER) -> None:
        self._host = host
        self._tracer = tracer
        self.many = ManyServer(self.Generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString)

    async def GenerateMany(self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Context) -> None:
        await self.many.serve(request_iterator, context)

    async def Generate(self, request: pb.GenerateRequest, context: Context | CallContext) -> None:
        arrival = time.monotonic()
        span = self._tracer.serve("generate", context.invocation_metadata, arrival)
        traced = TracedRequest(span, request, arrival) if span.recording else None
        try:
            engine = self._host.ready()
            stream = await self._open(engine, request, arrival, traced)
        except TandemError as error:
            if traced is not None:
                traced.refused(error)
            # Not the message: it may quote a value that the client sent.
            log.info(
                "refused",
                extra={"request_id": request.request_id[:MAX_NAME_BYTES], "reason": error.reason, "field": error.field},
            )
            await abort(context, error)
        except asyncio.CancelledError:
            if traced is not None:
                traced.refused(None)
            raise
        outcome = "cancelled"
        # A write to a reader who does not read ends only by cancelling it.
        task = asyncio.current_task()
        stream.outbox.on_overflow = task.cancel if task is not None else None
        try:
            while events := await stream.outbox.get():
                await context.write(pb.GenerateResponse(events=events))
            outcome = "finished"
        except asyncio.CancelledError:
            if stream.outbox.error is None:
                raise
        finally:
            engine.close_stream(stream)
            outcome = stream.outbox.error.reason if stream.outbox.error is not None else outcome
            _log_finished(engine, stream, outcome)
            if traced is not None:
                traced.finished(stream, engine.identity, outcome)
        if stream.outbox.error is not None:
            await abort(context, stream.outbox.error)

    async def _open(
        self, engine: Engine, request: pb.GenerateRequest, arrival: float, traced: TracedRequest | None
    ) -> Stream:
        engine.check_accepts()
        _check_model(engine, request.model)
        _check_digest(engine, request.tokenizer_digest)
        check_envelope(request)
        valid = await self._validated(engine, request)
        grammar = await engine.grammars.compile(request.structured) if request.HasField("structured") else None
        trace = traced.draft(engine.speculation) if traced is not None else ""
        return engine.open(request, valid, grammar, arrival, trace)

    async def _validated(self, engine: Engine, request: pb.GenerateRequest) -> Validated:
        if request.WhichOneof("prompt") == "text":
            # The tokenizer releases the GIL; a long prompt must not hold up the event loop.
            ids = await asyncio.to_thread(engine.tokenizer.encode, request.text, True)
        else:
            ids = list(request.token_ids.ids)
        return validate(request, ids, engine.limits)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        span = self._tracer.serve("embed", context.invocation_metadata)
        try:
            engine = self._host.ready()
            engine.check_accepts()
            _check_model(engine, request.model)
            _check_digest(engine, request.tokenizer_digest)
            response = await _embed(engine, request)
            grpc_status.done(span)
            return response
        except TandemError as error:
            grpc_status.failed(span, error)
            await abort(context, error)
        except asyncio.CancelledError:
            grpc_status.cancelled(span)
            raise
        finally:
            embedded(span, request)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        engine = self._host.engine
        return pb.ListModelsResponse(models=[model_info(engine)] if engine is not None else [])

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        try:
            engine = self._host.ready()
            _check_model(engine, request.model)
        except TandemError as error:
            await abort(context, error)
        return pb.GetModelInfoResponse(model=model_info(engine))

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> pb.GetTokenizerResponse:
        try:
            engine = self._host.ready()
            _check_model(engine, request.model)
        except TandemError as error:
            await abort(context, error)
        return engine.tokenizer.bundle.to_proto()


async def _embed(engine: Engine, request: pb.EmbedRequest) -> pb.EmbedResponse:
    limits = engine.limits
    if not request.inputs:
        raise invalid("inputs", [], "must have at least one prompt")
    for index, prompt in enumerate(request.inputs):
        if not 1 <= len(prompt.ids) <= limits.max_model_len:
            raise invalid(f"inputs[{index}]", len(prompt.ids), f"must have 1 to {limits.max_model_len} tokens")
        if max(prompt.ids) >= limits.vocab_size:
            raise invalid(f"inputs[{index}]", max(prompt.ids), f"token ids must be below {limits.vocab_size}")
    if request.pooling not in pb.Pooling.values():
        raise invalid("pooling", request.pooling, "must be a Pooling")
    pooling = "last" if request.pooling == pb.POOLING_LAST else "mean"
    normalize = request.normalize if request.HasField("normalize") else True
    response = pb.EmbedResponse(prompt_tokens=sum(len(prompt.ids) for prompt in request.inputs))
    for prompt in request.inputs:
        ids = list(prompt.ids)
        # One prompt per turn of the step loop, so that generation goes on in between.
        work = engine.loop.call(partial(engine.runner.embed, [ids], pooling, normalize))
        try:
            vectors = await asyncio.wrap_future(work)
        except NotImplementedError as error:
            raise TandemError("UNSUPPORTED", f"this model has no embeddings: {error}", field="Embed") from error
        response.embeddings.append(pb.Embedding(values=vectors[0].tolist()))
    return response


def _log_finished(engine: Engine, stream: Stream, outcome: str) -> None:
    request = stream.request
    now = time.monotonic()

    def ms(end: float | None) -> float | None:
        return None if end is None else round((end - request.arrival) * 1000, 1)

    log.info(
        "request",
        extra={
            "request_id": request.name,
            "outcome": outcome,
            "finish": ",".join(stream.finish_reasons),
            "prompt_tokens": len(request.prompt),
            "cached_tokens": request.cached_tokens,
            "completion_tokens": stream.completion_tokens,
            "ttft_ms": ms(request.first_token),
            "total_ms": ms(now),
            "preemptions": request.preemptions,
            "drafts_proposed": request.drafts_proposed,
            "drafts_accepted": request.drafts_accepted,
            "accepted_by_proposer": request.accepted_by_proposer,
            "acceptance_length": round(request.acceptance_length, 2),
            "attempt": max(1, stream.attempt),
            "engine": engine.identity.engine,
        },
    )
