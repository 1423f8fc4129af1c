"""A chat request made ready: rendered, tokenized, planned. Chat, responses and messages all go this way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from gateway.client import LoadedTokenizer
from gateway.context import Gateway, RequestContext
from gateway.conversation import render_prompt
from gateway.errors import unsupported
from gateway.generation import CollectedChoice, Generation, finish_reason
from gateway.params import fit_context, structured_output, truncated
from gateway.schemas.chat import ChatBody
from gateway.text import admit, build_request, encode, off_loop_if
from gateway.tools.base import CallArgs, CallStart, Content, Piece, Reasoning, is_object
from gateway.tools.plan import OutputPlan, plan_output
from tandem.inference.v1 import inference_pb2 as pb

# Rendering more messages than this is moved off the event loop.
OFF_LOOP_MESSAGES = 64


@dataclass(slots=True)
class ChatJob:
    """One chat, ready to be sent."""

    body: ChatBody
    model: str
    info: pb.ModelInfo
    loaded: LoadedTokenizer
    prompt: str
    ids: list[int]
    plan: OutputPlan
    generation: Generation
    created: int


async def render_ids(body: ChatBody, loaded: LoadedTokenizer) -> tuple[str, list[int]]:
    """Prompt text and token ids of a chat; long ones are made off the event loop."""
    tools = body.tools if body.tool_choice != "none" else None
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    prompt = await off_loop_if(
        body.chat_template is not None or len(body.messages) > OFF_LOOP_MESSAGES,
        lambda: render_prompt(
            loaded.templates,
            body.messages,
            tools=tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final=bool(body.continue_final_message),
            variables=variables,
            documents=body.documents,
            request_template=body.chat_template,
        ),
    )
    return prompt, await encode(loaded, prompt)


async def prepare_chat(request: Request, gateway: Gateway, context: RequestContext, body: ChatBody) -> ChatJob:
    """Validates what only the model can tell, and builds the request.

    Raises:
        ApiError: with the field to blame.
    """
    if body.chat_template is not None and not gateway.settings.allow_request_templates:
        raise unsupported("chat_template", "this server takes no templates from requests")
    info = await gateway.client.resolve(body.model)
    loaded = await gateway.client.tokenizer(info)
    settings = gateway.settings
    plan = plan_output(
        body,
        structured_output(body),
        loaded.templates.source,
        loaded.tokenizer.id_of,
        settings.tool_parser,
        settings.reasoning_parser,
    )
    prompt, ids = await render_ids(body, loaded)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    ids = truncated(ids, body.truncate_prompt_tokens, info.max_model_len, wanted)
    max_tokens = fit_context(len(ids), wanted, info.max_model_len, "messages")
    admit(gateway, context, info, len(ids))
    made = build_request(
        request,
        gateway,
        context,
        body,
        info,
        loaded,
        ids,
        max_tokens=max_tokens,
        n=body.n or 1,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        structured=plan.structured,
        keep_special=plan.keep_special,
    )
    if body.return_token_sources:
        # One delta per token, so that each piece of text has one source.
        made.output.single_tokens = True
    return ChatJob(
        body,
        body.model or info.name,
        info,
        loaded,
        prompt,
        ids,
        plan,
        Generation(gateway.client, made, context.span),
        int(time.time()),
    )


@dataclass(slots=True)
class Answer:
    """One choice's text, split up."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str = "stop"


def fold(pieces: list[Piece], answer: Answer) -> None:
    """Adds pieces to an answer."""
    for piece in pieces:
        if isinstance(piece, Content):
            answer.content += piece.text
        elif isinstance(piece, Reasoning):
            answer.reasoning += piece.text
        elif isinstance(piece, CallStart):
            answer.calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        elif isinstance(piece, CallArgs):
            answer.calls[piece.index]["function"]["arguments"] += piece.text


def final_finish(reason: str, calls: int, plan: OutputPlan, last_arguments: str = "{}") -> str:
    """finish_reason, given how many calls were made. `length` stays where it cut the last call's arguments off."""
    if not calls or not plan.tools_on or (reason == "length" and not is_object(last_arguments)):
        return reason
    return "tool_calls"


def split_answer(job: ChatJob, choice: CollectedChoice) -> Answer:
    """A whole choice's text as content, reasoning and calls."""
    assert choice.finished is not None
    answer = Answer(finish=finish_reason(choice.finished))
    parser = job.plan.make_parser(job.prompt)
    if parser is None:
        answer.content = choice.text
        return answer
    fold(parser.feed(choice.text), answer)
    fold(parser.finish(), answer)
    if job.body.parallel_tool_calls is False:
        del answer.calls[1:]
    last = answer.calls[-1]["function"]["arguments"] if answer.calls else ""
    forced = job.body.tool_choice not in (None, "auto", "none")
    if answer.calls and not forced and not all(is_object(c["function"]["arguments"]) for c in answer.calls):
        # A call that was cut off or is no JSON helps nobody: what is whole stays, the rest is text.
        whole = [call for call in answer.calls if is_object(call["function"]["arguments"])]
        answer.calls = whole
        if not whole:
            answer.content = choice.text
    if answer.calls:
        answer.content = answer.content.strip()
    answer.finish = final_finish(answer.finish, len(answer.calls), job.plan, last)
    return answer
