"""InferenceService of the router: the same contract as an engine's, served from the fleet."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from router import tracing
from router.admission import Admission, Job
from router.fleet import Fleet
from router.forward import Generation
from router.metrics import RouterMetrics
from router.outbox import Outbox, SharedSink
from router.policies import Query
from router.recorder import Recorder
from router.requests import check_possible, complete, make_query
from router.retry import CrashList, KeptBytes, RetryBudget
from router.settings import RouterSettings
from router.shared import Shared
from router.tasks import cancel_quietly
from tandem.errors import TandemError, abort
from tandem.inference.v1 import inference_pb2 as pb
from tandem.many import CallContext, ManyServer
from tandem.pace import Pace
from tandem.tracing import NULL_SPAN, NULL_TRACER, Span, Tracer, grpc_status, names

log = logging.getLogger("router.service")

SERVICE = "tandem.inference.v1.InferenceService"
UNARY_TRIES = 3


class InferenceServicer:
    """Handlers of InferenceService. Generate, Embed and GetTokenizer pass the engine's bytes on."""

    def __init__(
        self,
        fleet: Fleet,
        settings: RouterSettings,
        metrics: RouterMetrics,
        token: str = "",
        trusted: bool = True,
        tracer: Tracer = NULL_TRACER,
    ) -> None:
        # Tenant and raised priority are believed only from callers that showed the token or sit on this machine.
        self._trusted = trusted
        self.fleet = fleet
        self.settings = settings
        self._token = token
        self._tracer = tracer
        self.admission = Admission(fleet, settings)
        self.recorder = Recorder(settings.recorder_size, settings.recorder_file)
        self.shared = Shared(
            settings=settings,
            live=fleet.live,
            admission=self.admission,
            budget=RetryBudget(settings.retry_budget),
            kept=KeptBytes(settings.resume_max_bytes),
            crashes=CrashList(settings.crash_refusal_s),
            recorder=self.recorder,
            metrics=metrics,
        )
        self.pace = Pace(settings.coalesce_ms / 1000)
        self.many = ManyServer(self.generate, pause=lambda: self.pace.seconds)
        self.draining = False
        self.live: set[asyncio.Task[Any]] = set()
        fleet.on_tick(self.pace.tick)
        metrics.watch(fleet, self.admission)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The generic handler; None as serializer means bytes."""
        new = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
                "GenerateMany": grpc.stream_stream_rpc_method_handler(
                    self.many.serve,
                    pb.GenerateManyRequest.FromString,
                    pb.GenerateManyResponse.SerializeToString,
                ),
                "Embed": new(self.embed),
                "GetTokenizer": new(self.get_tokenizer),
                "ListModels": new(
                    self.list_models,
                    pb.ListModelsRequest.FromString,
                    pb.ListModelsResponse.SerializeToString,
                ),
                "GetModelInfo": new(
                    self.get_model_info,
                    pb.GetModelInfoRequest.FromString,
                    pb.GetModelInfoResponse.SerializeToString,
                ),
            },
        )

    # -- Generate

    async def generate(self, raw: bytes, context: grpc.aio.ServicerContext | CallContext) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.live.add(task)
        span = self._tracer.serve("route", context.invocation_metadata)
        try:
            await self._generate(raw, context, span)
            grpc_status.done(span)
        except TandemError as error:
            grpc_status.failed(span, error)
            await abort(context, error)
        except grpc.aio.AioRpcError as error:
            grpc_status.failed(span, TandemError.from_rpc(error))
            await _pass_on(context, error)
        except asyncio.CancelledError:
            if self.draining and not context.cancelled():
                grpc_status.failed(span, _draining())
                await abort(context, _draining())
            grpc_status.cancelled(span)
            raise
        finally:
            span.end()
            self.live.discard(task)

    async def _generate(self, raw: bytes, context: grpc.aio.ServicerContext | CallContext, span: Span) -> None:
        arrival = time.monotonic()
        self._check_caller(context)
        try:
            request = pb.GenerateRequest.FromString(raw)
        except DecodeError as error:
            raise TandemError("INVALID_FIELD", f"the request does not parse: {error}", field="request") from error
        extra = complete(request, _metadata(context, "x-request-id"))
        if extra:
            raw += extra
        if span.recording:
            tracing.request(span, f"{SERVICE}/Generate", request)
        self.shared.crashes.check(request)
        query = make_query(request)
        model = self.fleet.resolve(request.model)
        check_possible(request, query, model, self.fleet.serving(model))
        job = self._job(request, query, model, arrival, context)
        if isinstance(context, CallContext):
            sink = SharedSink(context, self.settings.stream_buffer_bytes)
            await Generation(self.shared, raw, request, query, job, sink, span).run()
            return
        outbox = Outbox(context.write, self.settings.stream_buffer_bytes, self.pace)
        writer = asyncio.create_task(outbox.run())
        generation = Generation(self.shared, raw, request, query, job, outbox, span)
        try:
            await generation.run()
            outbox.close()
            await writer
        except (TandemError, grpc.aio.AioRpcError):
            # What was received before the error still reaches the client.
            outbox.close()
            await writer
            raise
        finally:
            if not writer.done():
                await cancel_quietly(writer)

    def _check_caller(self, context: grpc.aio.ServicerContext | CallContext) -> None:
        if self.draining:
            raise _draining()
        if self._token and not secrets.compare_digest(
            _metadata(context, "authorization").encode(), f"Bearer {self._token}".encode()
        ):
            raise TandemError("UNAUTHENTICATED", "the services' token is missing or wrong")

    def _job(
        self,
        request: pb.GenerateRequest,
        query: Query,
        model: str,
        arrival: float,
        context: grpc.aio.ServicerContext | CallContext,
    ) -> Job:
        limits = [context.time_remaining(), request.timeout_ms / 1000, self.settings.request_timeout_s]
        given = [limit for limit in limits if limit]
        resumed = request.HasField("resume")
        return Job(
            model=model,
            query=query,
            priority=request.priority if self._trusted else max(0, request.priority),
            tenant=request.tenant if self._trusted else "",
            arrival=arrival,
            deadline=arrival + min(given) if given else None,
            numerics_id=request.resume.numerics_id if resumed else "",
            tokenizer_digest=request.tokenizer_digest,
            again=resumed,
        )

    # -- the rest

    async def embed(self, raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        span = self._tracer.serve("route", context.invocation_metadata)
        try:
            self._check_caller(context)
            request = pb.EmbedRequest.FromString(raw)
            if span.recording:
                tracing.request(span, f"{SERVICE}/Embed", request)
            model = self.fleet.resolve(request.model)
            query = Query(request.request_id, sum(len(item.ids) for item in request.inputs))
            answer = await self._unary("embed", raw, model, query, context, span)
            grpc_status.done(span)
            return answer
        except DecodeError as error:
            unread = TandemError("INVALID_FIELD", f"the request does not parse: {error}")
            grpc_status.failed(span, unread)
            await abort(context, unread)
        except TandemError as error:
            grpc_status.failed(span, error)
            await abort(context, error)
        except asyncio.CancelledError:
            grpc_status.cancelled(span)
            raise
        finally:
            span.end()

    async def get_tokenizer(self, raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            self._check_caller(context)
            model = self.fleet.resolve(pb.GetTokenizerRequest.FromString(raw).model)
            return await self._unary("tokenizer", raw, model, Query("", 0), context)
        except DecodeError as error:
            await abort(context, TandemError("INVALID_FIELD", f"the request does not parse: {error}"))
        except TandemError as error:
            await abort(context, error)

    async def _unary(
        self,
        method: str,
        raw: bytes,
        model: str,
        query: Query,
        context: grpc.aio.ServicerContext,
        span: Span = NULL_SPAN,
    ) -> bytes:
        """One call to the least loaded engine, and to another one if that is unavailable."""
        left = context.time_remaining()
        job = Job(model=model, query=query, deadline=None if left is None else time.monotonic() + left)
        for last in (False,) * (UNARY_TRIES - 1) + (True,):
            grant = await self.admission.acquire(job)
            try:
                span.event("attempt", {names.ENGINE: grant.engine.address})
                call = getattr(grant.engine, method)(
                    raw,
                    timeout=context.time_remaining(),
                    metadata=(*grant.engine.metadata(query.request_id), *span.headers),
                )
                answer = await call
                grant.engine.succeeded()
                grant.engine.load.accepted(query.prompt_tokens)
                return answer
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or last:
                    grpc_status.failed(span, TandemError.from_rpc(error))
                    await _pass_on(context, error)
                grant.engine.failed(error.details() or "")
                job.avoid = job.avoid | {grant.engine.address}
                job.again = True
            finally:
                self.admission.release(grant, job)
        raise AssertionError("the last try returns or aborts")

    async def list_models(self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext) -> Any:
        return pb.ListModelsResponse(models=self.fleet.models())

    async def get_model_info(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> Any:
        try:
            model = self.fleet.resolve(request.model)
        except TandemError as error:
            await abort(context, error)
        return pb.GetModelInfoResponse(model=self.fleet.usable(model)[0].model)


async def _pass_on(context: grpc.aio.ServicerContext | CallContext, error: grpc.aio.AioRpcError) -> NoReturn:
    """Ends the call with an engine's own status, details included."""
    trailing = tuple((key, value) for key, value in error.trailing_metadata() or ())
    await context.abort(error.code(), error.details() or "", trailing)
    raise AssertionError("abort raises")


def _metadata(context: grpc.aio.ServicerContext | CallContext, key: str) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return value if isinstance(value, str) else value.decode(errors="replace")
    return ""


def _draining() -> TandemError:
    return TandemError("ENGINE_DRAINING", "this router is shutting down; ask another", retry_after_s=1.0)
