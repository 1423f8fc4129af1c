"""The gateway's side of InferenceService: models and tokenizers (cached), Generate and Embed."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import grpc

from gateway.errors import ApiError, from_rpc, from_tandem
from gateway.settings import GatewaySettings
from gateway.templates import ChatTemplates
from tandem import rpc
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc as pb_grpc
from tandem.many import ManyClient
from tandem.pace import Pace
from tandem.tokenizer import Tokenizer, TokenizerBundle
from tandem.tracing import NULL_SPAN, Span

MODELS_TTL_S = 2.0
CALL_TIMEOUT_S = 10.0
# A router has this long after a request's deadline to say so itself; then the gateway does.
ROUTER_SLACK_S = 2.0
# How long a request waits for news of the models when there are old ones to go by.
MODELS_PATIENCE_S = 1.0
MAX_TOKENIZERS = 8


class LoadedTokenizer:
    """A tokenizer with its templates, built once per digest."""

    def __init__(self, bundle: TokenizerBundle, template_override: str = "") -> None:
        self.bundle = bundle
        self.digest = bundle.digest
        self.tokenizer = Tokenizer(bundle)
        self.templates = ChatTemplates(bundle, template_override)
        self.stop_ids = frozenset(bundle.stop_token_ids)
        self.special_ids = frozenset(bundle.special_token_ids)


class RouterClient:
    """One channel to the router. Raises ApiError for every failed call."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._generate: ManyClient | None = None
        self._pace = Pace(settings.coalesce_ms / 1000)
        self._pacing: asyncio.Task[None] | None = None
        self._models: list[pb.ModelInfo] = []
        self._by_name: dict[str, pb.ModelInfo] = {}
        self._models_at = float("-inf")
        self._lock = asyncio.Lock()
        self._tokenizers: OrderedDict[str, LoadedTokenizer] = OrderedDict()
        self._tokenizer_lock = asyncio.Lock()
        self._override = Path(settings.chat_template).read_text() if settings.chat_template else ""
        token = Path(settings.service_token_file).read_text().strip() if settings.service_token_file else ""
        self.metadata: tuple[tuple[str, str], ...] = (("authorization", f"Bearer {token}"),) if token else ()

    async def start(self) -> None:
        self._channel = open_channel(self._settings, self._settings.router)
        self._stub = pb_grpc.InferenceServiceStub(self._channel)
        # Answers stay bytes here: a stream that breaks is resumed from the bytes that came.
        self._generate = ManyClient(self._channel, self.metadata, lambda: self._pace.seconds)
        self._generate.start()
        self._pacing = asyncio.create_task(self._pace.run())

    async def close(self) -> None:
        if self._pacing is not None:
            self._pacing.cancel()
        if self._generate is not None:
            await self._generate.close()
        if self._channel is not None:
            await self._channel.close()

    async def models(self, fresh: bool = False) -> list[pb.ModelInfo]:
        """Models served now. May be up to two seconds old."""
        if fresh or time.monotonic() - self._models_at > MODELS_TTL_S:
            async with self._lock:
                if fresh or time.monotonic() - self._models_at > MODELS_TTL_S:
                    await self._refresh_models()
        return self._models

    async def _refresh_models(self) -> None:
        try:
            answer = await self._stub.ListModels(pb.ListModelsRequest(), timeout=CALL_TIMEOUT_S, metadata=self.metadata)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        self._models = list(answer.models)
        self._by_name = {name: info for info in self._models for name in (info.name, *info.aliases)}
        self._models_at = time.monotonic()

    async def _models_for_a_request(self) -> list[pb.ModelInfo]:
        """Models that were served lately. A router that is just being lost (silently, maybe) must not cost a request:
        its own call finds the next router, and tells if the model is gone."""
        try:
            async with asyncio.timeout(MODELS_PATIENCE_S if self._models else None):
                return await self.models()
        except (ApiError, TimeoutError):
            if not self._models:
                raise
            return self._models

    async def resolve(self, name: str | None) -> pb.ModelInfo:
        """The model of this name or alias; without a name, the only one.

        Raises:
            ApiError: 404 for a name that was never served, 503 while no engine serves it.
        """
        models = await self._models_for_a_request()
        if name:
            found = self._by_name.get(name)
            if found is not None:
                return found
        elif len(models) == 1:
            return models[0]
        elif len(models) > 1:
            served = ", ".join(sorted(info.name for info in models))
            raise ApiError(400, f"model is required; served are {served}.", param="model", code="missing_model")
        # The router knows what was served before, so it decides between 404 and 503.
        try:
            answer = await self._stub.GetModelInfo(
                pb.GetModelInfoRequest(model=name or ""), timeout=CALL_TIMEOUT_S, metadata=self.metadata
            )
        except grpc.RpcError as error:
            raise _unknown_model(TandemError.from_rpc(error), name, models) from None
        self._models_at = float("-inf")
        return answer.model

    async def tokenizer(self, info: pb.ModelInfo) -> LoadedTokenizer:
        """The model's tokenizer, fetched once per digest."""
        found = self._tokenizers.get(info.tokenizer_digest)
        if found is not None:
            return found
        async with self._tokenizer_lock:
            found = self._tokenizers.get(info.tokenizer_digest)
            if found is not None:
                return found
            try:
                message = await self._stub.GetTokenizer(
                    pb.GetTokenizerRequest(model=info.name), timeout=60.0, metadata=self.metadata
                )
            except grpc.RpcError as error:
                raise from_rpc(error) from None
            loaded = await asyncio.to_thread(
                lambda: LoadedTokenizer(TokenizerBundle.from_proto(message), self._override)
            )
            self._tokenizers[info.tokenizer_digest] = loaded
            while len(self._tokenizers) > MAX_TOKENIZERS:
                self._tokenizers.popitem(last=False)
            return loaded

    def forget_models(self) -> None:
        """Makes the next request ask the router again."""
        self._models_at = float("-inf")

    def generate(self, request: pb.GenerateRequest, wait_for_ready: bool = False, span: Span = NULL_SPAN) -> Any:
        """Starts Generate; the call is read with `.read()`, which gives serialized GenerateResponses."""
        timeout = request.timeout_ms / 1000 + ROUTER_SLACK_S if request.timeout_ms else None
        metadata = (*self.metadata, *span.headers)
        assert self._generate is not None
        return self._generate(
            request.SerializeToString(), timeout=timeout, metadata=metadata, wait_for_ready=wait_for_ready
        )

    async def embed(self, request: pb.EmbedRequest, limit_s: float | None, span: Span = NULL_SPAN) -> pb.EmbedResponse:
        try:
            return await self._stub.Embed(request, timeout=limit_s, metadata=(*self.metadata, *span.headers))
        except grpc.RpcError as error:
            raise from_rpc(error) from None


def _unknown_model(error: TandemError, name: str | None, models: list[pb.ModelInfo]) -> ApiError:
    """Says which models are served when one is not known."""
    if error.code is grpc.StatusCode.NOT_FOUND:
        served = ", ".join(sorted(info.name for info in models)) or "none"
        return ApiError(
            404,
            f"The model {(name or '')[:200]!r} does not exist; served: {served}.",
            param="model",
            code="model_not_found",
        )
    return from_tandem(error)


def open_channel(settings: GatewaySettings, address: str) -> grpc.aio.Channel:
    """Plain, or TLS with the given authority and our own certificate (mTLS)."""
    if not settings.router_tls_ca:
        return rpc.channel(address)
    key = Path(settings.router_tls_key).read_bytes() if settings.router_tls_key else None
    cert = Path(settings.router_tls_cert).read_bytes() if settings.router_tls_cert else None
    credentials = grpc.ssl_channel_credentials(Path(settings.router_tls_ca).read_bytes(), key, cert)
    target = rpc.check_address(address)
    return grpc.aio.secure_channel(target, credentials, options=list(rpc.CHANNEL_OPTIONS))
