"""POST /v1/responses, the part without server-side state."""

from __future__ import annotations

import secrets
import time
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.body import parse_body
from gateway.chat_job import Answer, ChatJob, prepare_chat, split_answer
from gateway.context import context_of, gateway_of
from gateway.docs import describe
from gateway.generation import collect, gather_all
from gateway.response_stream import ResponseStream
from gateway.schemas.responses import NamedResponseTool, ResponsesBody, to_chat
from gateway.text import account, run_plain, start_stream
from tandem.inference.v1 import inference_pb2 as pb

router = APIRouter()


@router.post(
    "/v1/responses",
    **describe("Answer, in the form of the Responses API", ResponsesBody, ok="Response", errors=(404,), stream=True),
)
async def create_response(request: Request) -> Response:
    gateway, context = gateway_of(request), context_of(request)
    settings = gateway.settings
    body = await parse_body(request, ResponsesBody, settings.max_body_bytes, settings.body_timeout)
    job = await prepare_chat(request, gateway, context, to_chat(body))
    shell = response_shell(body, job)
    if body.stream:
        stream = ResponseStream(job, shell, gateway, context)
        return await start_stream(request, gateway, context, [job.generation], stream.chunks, stream.error)
    (collected,) = await run_plain(
        request, gateway, lambda: gather_all([job.generation], lambda one: collect(one, context.first_token))
    )
    answer = split_answer(job, collected.choices[0])
    context.engine = collected.accepted.engine
    account(gateway, context, [collected.usage], [answer.finish])
    finish_response(shell, answer.finish, collected.usage)
    shell["output"] = _items(answer)
    return Response(orjson.dumps(shell), media_type="application/json")


def response_shell(body: ResponsesBody, job: ChatJob) -> dict[str, Any]:
    """The response object as it is at the start: what was asked, nothing answered."""
    choice = body.tool_choice
    form: dict[str, Any] = {"type": "text"}
    if body.text and body.text.format:
        form = body.text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": "resp_" + secrets.token_hex(24),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": job.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedResponseTool) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or []],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def finish_response(shell: dict[str, Any], finish: str, usage: pb.Usage) -> None:
    """Sets status and usage."""
    incomplete = finish == "length"
    shell["status"] = "incomplete" if incomplete else "completed"
    shell["incomplete_details"] = {"reason": "max_output_tokens"} if incomplete else None
    shell["usage"] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _items(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        items.append(
            {
                "id": "rs_" + secrets.token_hex(12),
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": answer.reasoning}],
                "status": "completed",
            }
        )
    if answer.content or not answer.calls:
        items.append(
            {
                "id": "msg_" + secrets.token_hex(12),
                "type": "message",
                "status": "incomplete" if answer.finish == "length" else "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}],
            }
        )
    for call in answer.calls:
        items.append(
            {
                "id": "fc_" + secrets.token_hex(12),
                "type": "function_call",
                "status": "completed",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
        )
    return items
