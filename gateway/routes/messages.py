"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.body import parse_body
from gateway.chat_job import Answer, ChatJob, prepare_chat, render_ids, split_answer
from gateway.context import Gateway, RequestContext, context_of, gateway_of
from gateway.docs import describe
from gateway.errors import ApiError
from gateway.generation import collect, gather_all
from gateway.piece_stream import End, pieces_of
from gateway.schemas.messages import CountBody, MessagesBody, to_chat
from gateway.sse import named
from gateway.text import account, run_plain, start_stream
from gateway.tools.base import CallArgs, CallStart, Content, Piece
from tandem.inference.v1 import inference_pb2 as pb

router = APIRouter()

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@router.post(
    "/v1/messages",
    **describe(
        "Answer, in Anthropic's form", MessagesBody, ok="AnthropicMessage", errors=(404,), stream=True, anthropic=True
    ),
)
async def create_message(request: Request) -> Response:
    gateway, context = gateway_of(request), context_of(request)
    settings = gateway.settings
    body = await parse_body(request, MessagesBody, settings.max_body_bytes, settings.body_timeout)
    job = await prepare_chat(request, gateway, context, to_chat(body))
    if body.stream:
        stream = _MessageStream(job, gateway, context)
        return await start_stream(request, gateway, context, [job.generation], stream.chunks, anthropic_error)
    (collected,) = await run_plain(
        request, gateway, lambda: gather_all([job.generation], lambda one: collect(one, context.first_token))
    )
    choice = collected.choices[0]
    assert choice.finished is not None
    answer = split_answer(job, choice)
    context.engine = collected.accepted.engine
    account(gateway, context, [collected.usage], [answer.finish])
    result = {
        **_shell(job),
        "content": _blocks(answer),
        **_stop(answer.finish, choice.finished),
        "usage": _usage(collected.usage),
    }
    return Response(orjson.dumps(result), media_type="application/json")


@router.post(
    "/v1/messages/count_tokens",
    **describe("Count a prompt's tokens", CountBody, ok="TokenCount", errors=(404,), anthropic=True),
)
async def count_tokens(request: Request) -> Response:
    gateway = gateway_of(request)
    settings = gateway.settings
    body = await parse_body(request, CountBody, settings.max_body_bytes, settings.body_timeout)
    chat = to_chat(body)
    loaded = await gateway.client.tokenizer(await gateway.client.resolve(body.model))
    _, ids = await render_ids(chat, loaded)
    return Response(orjson.dumps({"input_tokens": len(ids)}), media_type="application/json")


def anthropic_error(error: ApiError) -> bytes:
    return named("error", error.to_anthropic())


def _shell(job: ChatJob) -> dict[str, Any]:
    return {
        "id": "msg_" + secrets.token_hex(12),
        "type": "message",
        "role": "assistant",
        "model": job.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop(finish: str, finished: pb.Finished) -> dict[str, Any]:
    if finish == "stop" and finished.HasField("stop_string"):
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_string}
    return {"stop_reason": _STOP.get(finish, "end_turn"), "stop_sequence": None}


def _usage(usage: pb.Usage) -> dict[str, int]:
    # Anthropic counts cached input apart from input.
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": _input(call["function"]["arguments"]),
            }
        )
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object; what was cut off cannot be one."""
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


class _MessageStream:
    """message_start, blocks that open, grow and close, message_delta, message_stop."""

    def __init__(self, job: ChatJob, gateway: Gateway, context: RequestContext) -> None:
        self._job = job
        self._gateway = gateway
        self._context = context
        self._index = -1
        self._kind = ""

    async def chunks(self) -> AsyncIterator[bytes]:
        """The events, as bytes. Raises ApiError where the generation fails."""
        accepted = self._job.generation.accepted
        start = pb.Usage(prompt_tokens=accepted.prompt_tokens, cached_tokens=accepted.cached_tokens)
        message = {**_shell(self._job), "usage": _usage(start)}
        yield named("message_start", {"type": "message_start", "message": message}) + named("ping", {"type": "ping"})
        async for item in pieces_of(self._job, self._gateway, self._context):
            if isinstance(item, End):
                yield self._end(item)
            else:
                out = b"".join(self._piece(piece) for piece in item)
                if out:
                    yield out

    def _end(self, end: End) -> bytes:
        out = b""
        if self._index < 0:
            out += self._open("text", {"type": "text", "text": ""})
        out += self._close()
        delta = {"type": "message_delta", "delta": _stop(end.reason, end.finished), "usage": _usage(end.usage)}
        return out + named("message_delta", delta) + named("message_stop", {"type": "message_stop"})

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        out = self._close()
        self._index += 1
        self._kind = kind
        event = {"type": "content_block_start", "index": self._index, "content_block": block}
        return out + named("content_block_start", event)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return named("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})

    def _piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallStart):
            return self._open("tool_use", {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
        if isinstance(piece, CallArgs):
            return self._delta({"type": "input_json_delta", "partial_json": piece.text})
        if isinstance(piece, Content):
            if self._kind == "tool_use" and not piece.text.strip():
                return b""
            out = b"" if self._kind == "text" else self._open("text", {"type": "text", "text": ""})
            return out + self._delta({"type": "text_delta", "text": piece.text})
        out = b""
        if self._kind != "thinking":
            out = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        return out + self._delta({"type": "thinking_delta", "thinking": piece.text})
