"""What all text endpoints do: find the model, make the request for the router, account for the answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway.client import LoadedTokenizer
from gateway.context import Gateway, RequestContext
from gateway.errors import ApiError, bad
from gateway.generation import Generation, receipt_dict
from gateway.keys import cache_salt
from gateway.params import check_ids, sampling_params, stop_conditions
from gateway.schemas.sampling import SamplingBody
from gateway.sse import EventStream, openai_error, until_gone
from gateway.tracing import request_attributes
from tandem.inference.v1 import inference_pb2 as pb
from tandem.tracing import names

# Characters from which tokenizing would hold the event loop for too long (about 1 ms).
OFF_LOOP_CHARS = 2_000
MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000
T = TypeVar("T")


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(16)}"


async def encode(loaded: LoadedTokenizer, text: str, add_special: bool = False) -> list[int]:
    """Token ids; long texts are tokenized on a worker thread."""
    try:
        if len(text) < OFF_LOOP_CHARS:
            return loaded.tokenizer.encode(text, add_special)
        return await asyncio.to_thread(loaded.tokenizer.encode, text, add_special)
    except ValueError as error:
        raise bad(f"The text cannot be tokenized: {error}.") from None


async def off_loop_if(condition: bool, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if condition else work()


def timeout_ms(request: Request, gateway: Gateway) -> int:
    """Milliseconds that this request may take, 0 for no limit: the header's, but never above the server's own."""
    own = int(gateway.settings.request_timeout * 1000)
    raw = request.headers.get("x-request-timeout-ms")
    if raw is None:
        return own
    if not (raw.isascii() and raw.isdigit()) or not 1 <= int(raw[:20]) <= MAX_TIMEOUT_MS:
        raise bad(
            f"Header x-request-timeout-ms is {raw[:40]!r}, but it must be a whole number from 1 to {MAX_TIMEOUT_MS}.",
            "x-request-timeout-ms",
        )
    return min(int(raw), own) if own else int(raw)


def priority_of(context: RequestContext, asked: int | None) -> int | None:
    """Raises ApiError if a request wants to be sooner than its key may."""
    best = context.key.priority if context.key else None
    if asked is None:
        return best
    if best is not None and asked < best:
        raise bad(f"priority is {asked}, but this key's highest priority is {best} (lower is sooner).", "priority")
    return asked


def build_request(
    request: Request,
    gateway: Gateway,
    context: RequestContext,
    body: SamplingBody,
    info: pb.ModelInfo,
    loaded: LoadedTokenizer,
    ids: list[int],
    *,
    max_tokens: int | None,
    n: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    structured: pb.StructuredOutput | None,
    keep_special: bool = False,
) -> pb.GenerateRequest:
    """The Generate request of one prompt.

    Raises:
        ApiError: 400 for what only the model can tell (ids, n, logprobs).
    """
    vocab = info.vocab_size or loaded.tokenizer.vocab_size
    most_n = min(gateway.settings.max_n, info.max_n or gateway.settings.max_n)
    if n > most_n:
        raise bad(f"n is {n}, but at most {most_n} choices are allowed.", "n")
    most = info.max_logprobs or 20
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if value is not None and value > most:
            raise bad(f"{name} is {value}, but at most {most} are allowed.", name)
    result = pb.GenerateRequest(
        model=info.name,
        request_id=context.id,
        token_ids=pb.TokenIds(ids=check_ids(ids, vocab, "prompt")),
        tokenizer_digest=loaded.digest,
        sampling=sampling_params(body, loaded, vocab),
        stop=stop_conditions(body, max_tokens, vocab),
        output=pb.OutputOptions(final_only=not body.stream, single_tokens=bool(body.stream and body.continuous_usage)),
        n=n,
        cache_salt=cache_salt(context.key, body.cache_salt, gateway.settings.share_cache),
        tenant=context.key.id if context.key else "",
        no_store=body.store is False,
    )
    if structured is not None:
        result.structured.CopyFrom(structured)
    priority = priority_of(context, body.priority)
    if priority is not None:
        result.priority = priority
    limit = timeout_ms(request, gateway)
    if limit:
        result.timeout_ms = limit
    if logprobs is not None:
        result.output.logprobs = logprobs
    if prompt_logprobs is not None:
        result.output.prompt_logprobs = prompt_logprobs
    if keep_special or body.skip_special_tokens is False:
        result.output.keep_special_tokens = True
    if body.receipt or gateway.recent.on:
        result.output.receipt = True
    if context.span.recording:
        request_attributes(context.span, body, result)
    return result


def admit(gateway: Gateway, context: RequestContext, info: pb.ModelInfo, prompt_tokens: int) -> None:
    """Charges the prompt's tokens to the key (429 if it has none left) and notes them for the log."""
    context.model = info.name
    context.prompt_tokens = prompt_tokens
    context.response_headers.update(gateway.limiter.take(context.key, 0, prompt_tokens))


def account(gateway: Gateway, context: RequestContext, usages: list[pb.Usage], reasons: list[str]) -> None:
    """Books a finished answer: log line, metrics, the key's tokens."""
    context.prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    context.completion_tokens = sum(usage.completion_tokens for usage in usages)
    context.cached_tokens = sum(usage.cached_tokens for usage in usages)
    context.finish = reasons[0] if reasons else ""
    context.span.set({names.FINISH_REASONS: reasons})
    context.receipts = [receipt_dict(usage.receipt) for usage in usages if usage.HasField("receipt")]
    gateway.limiter.charge(context.key, context.completion_tokens)
    metrics, model = gateway.metrics, context.model
    for reason in reasons:
        metrics.success.labels(model, reason).inc()
    metrics.prompt_tokens.labels(model).inc(context.prompt_tokens)
    metrics.generation_tokens.labels(model).inc(context.completion_tokens)
    metrics.cached_tokens.labels(model).inc(context.cached_tokens)
    metrics.e2e.labels(model).observe(time.monotonic() - context.started)
    if context.ttft_s is not None:
        metrics.ttft.labels(model).observe(context.ttft_s)


async def run_plain(request: Request, gateway: Gateway, work: Callable[[], Awaitable[T]]) -> T:
    """Runs a plain answer's work; the client's leaving cancels it."""
    gateway.metrics.running.inc()
    try:
        return await until_gone(request, work())
    finally:
        gateway.metrics.running.dec()


async def start_stream(
    request: Request,
    gateway: Gateway,
    context: RequestContext,
    generations: list[Generation],
    chunks: Callable[[], AsyncIterator[bytes]],
    error_event: Callable[[ApiError], bytes] = openai_error,
) -> Response:
    """The streaming response: sent when every generation is accepted, or after a while of waiting with comments.

    Raises:
        ApiError: a generation was refused before that, so the answer is a plain error.
        ClientGone: the client hung up.
    """
    opening = asyncio.ensure_future(open_all(generations))
    try:
        await until_gone(request, asyncio.wait({opening}, timeout=gateway.settings.header_delay))
        if opening.done():
            opening.result()
    except BaseException:
        opening.cancel()
        for generation in generations:
            generation.cancel()
        raise

    gateway.metrics.running.inc()

    def closed() -> None:
        gateway.metrics.running.dec()
        opening.cancel()
        for generation in generations:
            generation.cancel()

    return EventStream(chunks(), gateway, context, error_event=error_event, opening=opening, closed=closed)


async def open_all(generations: list[Generation]) -> None:
    """Opens all; the first refusal cancels the rest."""
    if len(generations) == 1:
        await generations[0].open()
        return
    try:
        async with asyncio.TaskGroup() as group:
            for generation in generations:
                group.create_task(generation.open())
    except* ApiError as failed:
        raise failed.exceptions[0] from None
