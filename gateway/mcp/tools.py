"""The tools: chat, complete, list_models, status. They go the way of all other requests: keys, limits, records."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field
from starlette.requests import Request

from gateway.chat_job import Answer, final_finish, fold, prepare_chat
from gateway.context import Gateway, RequestContext, context_of
from gateway.errors import ApiError
from gateway.generation import Generation, finish_reason
from gateway.routes.completions import prepare
from gateway.schemas.base import validate
from gateway.schemas.chat import ChatBody
from gateway.schemas.completions import CompletionBody
from gateway.text import account
from gateway.tools.base import Content, OutputParser, Piece
from tandem import __version__
from tandem.inference.v1 import inference_pb2 as pb

# Seconds between two progress notes.
PROGRESS_S = 0.25
DEFAULT_MAX_TOKENS = 512

Model = Annotated[str | None, Field(description="Name of the model; may be left out if one model is served.")]
MaxTokens = Annotated[int, Field(description="Most tokens to write.", ge=1)]
Temperature = Annotated[float | None, Field(description="0 is deterministic; default 1.", ge=0, le=2)]
TopP = Annotated[float | None, Field(description="Nucleus sampling.", ge=0, le=1)]
Seed = Annotated[int | None, Field(description="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, Field(description="Texts that end the answer.")]


class ChatTurn(BaseModel):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Written(BaseModel):
    """What was written, and what it took."""

    text: str
    finish_reason: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning: str = ""


class ServedModel(BaseModel):
    """A model that can be asked now."""

    name: str
    aliases: list[str]
    max_model_len: int
    architecture: str
    numerics_id: str
    batch_invariant: bool


class ModelList(BaseModel):
    models: list[ServedModel]


class EngineStatus(BaseModel):
    name: str
    state: str
    model: str | None
    running: int | None
    waiting: int | None
    kv_use: float | None
    hit_rate: float | None
    acceptance: float | None
    last_error: str


class Status(BaseModel):
    """Whether the server can work, and its engines."""

    ready: bool
    version: str
    models: list[str]
    # Unknown where the gateway may not look into its router.
    queued: int | None = None
    shed: int | None = None
    engines: list[EngineStatus] = []
    note: str = ""


class _Progress:
    """Tells the client what was written, not too often."""

    def __init__(self, ctx: Context, total: int) -> None:
        self._ctx = ctx
        self._total = total
        self._text = ""
        self._at = 0.0
        self.tokens = 0

    async def add(self, text: str, tokens: int, last: bool = False) -> None:
        self.tokens += tokens
        self._text += text
        now = time.monotonic()
        if self._text and (last or now - self._at >= PROGRESS_S):
            await self._ctx.report_progress(self.tokens, self._total, self._text)
            self._text, self._at = "", now


async def _write(
    gateway: Gateway, context: RequestContext, generation: Generation, parser: OutputParser | None, progress: _Progress
) -> tuple[Answer, pb.Usage]:
    """Runs a generation to its end. Raises ApiError; cancels the call on every way out."""
    answer, usage, finished = Answer(), pb.Usage(), pb.Finished()
    gateway.metrics.running.inc()
    try:
        context.engine = (await generation.open()).engine
        while (events := await generation.read()) is not None:
            for event in events:
                kind = event.WhichOneof("event")
                pieces: list[Piece] = []
                tokens = 0
                if kind == "delta":
                    context.first_token()
                    text, tokens = event.delta.text, len(event.delta.ids)
                    pieces = parser.feed(text) if parser is not None else [Content(text)]
                elif kind == "finished":
                    finished = event.finished
                    pieces = parser.finish() if parser is not None else []
                elif kind == "usage":
                    usage = event.usage
                fold(pieces, answer)
                said = "".join(piece.text for piece in pieces if isinstance(piece, Content))
                await progress.add(said, tokens, last=kind == "finished")
    finally:
        gateway.metrics.running.dec()
        generation.cancel()
    answer.finish = finish_reason(finished)
    return answer, usage


def _body(schema: type[Any], /, **values: Any) -> Any:
    """A validated body from what was given. Raises ApiError."""
    return validate(schema, {name: value for name, value in values.items() if value is not None})


def _refusal(error: ApiError) -> ToolError:
    return ToolError(error.message if error.code is None else f"{error.message} ({error.code})")


def build_server(gateway: Gateway) -> Any:
    """The protocol server of a gateway, with its tools."""
    server = MCPServer(
        "tandem",
        title="Tandem",
        version=__version__,
        instructions="Large language models served by Tandem. Use list_models to see what can be asked.",
        subscriptions=False,
        log_level="WARNING",
    )

    def of(ctx: Context) -> tuple[Request, RequestContext]:
        request: Any = ctx.request_context.request
        return request, context_of(request)

    @server.tool(title="Chat with a model")
    async def chat(
        ctx: Context,
        messages: Annotated[list[ChatTurn], Field(description="The conversation; the last turn is the user's.")],
        model: Model = None,
        max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
        temperature: Temperature = None,
        top_p: TopP = None,
        seed: Seed = None,
        stop: Stop = None,
    ) -> Written:
        """Answers a conversation. Text is reported as progress while it is written."""
        request, context = of(ctx)
        turns = [turn.model_dump() for turn in messages]
        try:
            body = _body(
                ChatBody,
                messages=turns,
                model=model,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop=stop,
                stream=True,
            )
            job = await prepare_chat(request, gateway, context, body)
            parser = job.plan.make_parser(job.prompt)
            answer, usage = await _write(gateway, context, job.generation, parser, _Progress(ctx, max_tokens))
        except ApiError as error:
            raise _refusal(error) from None
        last = answer.calls[-1]["function"]["arguments"] if answer.calls else ""
        finish = final_finish(answer.finish, len(answer.calls), job.plan, last)
        return _written(gateway, context, job.model, answer, usage, finish)

    @server.tool(title="Continue a text")
    async def complete(
        ctx: Context,
        prompt: Annotated[str, Field(description="The text to continue.")],
        model: Model = None,
        max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
        temperature: Temperature = None,
        top_p: TopP = None,
        seed: Seed = None,
        stop: Stop = None,
    ) -> Written:
        """Continues a text as it stands, without a chat template."""
        request, context = of(ctx)
        try:
            body = _body(
                CompletionBody,
                prompt=prompt,
                model=model,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop=stop,
                stream=True,
            )
            job = await prepare(request, gateway, context, body)
            generation = job.prompts[0].generation
            answer, usage = await _write(gateway, context, generation, None, _Progress(ctx, max_tokens))
        except ApiError as error:
            raise _refusal(error) from None
        return _written(gateway, context, job.model, answer, usage, answer.finish)

    @server.tool(title="List the models")
    async def list_models() -> ModelList:
        """The models that can be asked now."""
        try:
            models = await gateway.client.models()
        except ApiError as error:
            raise _refusal(error) from None
        return ModelList(models=[_model(info) for info in models])

    @server.tool(title="Status of the server")
    async def status() -> Status:
        """Whether the server can work, and the state of its engines."""
        try:
            models = await gateway.client.models(fresh=True)
        except ApiError as error:
            raise _refusal(error) from None
        found = Status(
            ready=bool(models) and not gateway.stopping, version=__version__, models=[info.name for info in models]
        )
        try:
            fleet = await gateway.fleet.fleet()
        except ApiError as error:
            found.note = error.message
            return found
        found.queued, found.shed = fleet["queued"], fleet["shed"]
        found.engines = [_engine(one) for one in fleet["engines"]]
        return found

    return server._lowlevel_server


def _written(
    gateway: Gateway, context: RequestContext, model: str, answer: Answer, usage: pb.Usage, finish: str
) -> Written:
    account(gateway, context, [usage], [finish])
    return Written(
        text=answer.content,
        reasoning=answer.reasoning,
        finish_reason=finish,
        model=model,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def _engine(one: dict[str, Any]) -> EngineStatus:
    return EngineStatus(**{name: one[name] for name in EngineStatus.model_fields})


def _model(info: pb.ModelInfo) -> ServedModel:
    return ServedModel(
        name=info.name,
        aliases=list(info.aliases),
        max_model_len=info.max_model_len,
        architecture=info.architecture,
        numerics_id=info.numerics_id,
        batch_invariant=info.batch_invariant,
    )
