"""POST /tokenize and /detokenize."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.body import parse_body
from gateway.context import gateway_of
from gateway.conversation import render_prompt
from gateway.docs import describe
from gateway.errors import bad
from gateway.params import check_ids
from gateway.schemas.tokens import DetokenizeBody, TokenizeBody
from gateway.text import OFF_LOOP_CHARS, encode, off_loop_if

router = APIRouter()


@router.post("/tokenize", **describe("Text or messages to token ids", TokenizeBody, ok="Tokens", errors=(404,)))
async def tokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    settings = gateway.settings
    body = await parse_body(request, TokenizeBody, settings.max_body_bytes, settings.body_timeout)
    if (body.prompt is None) == (body.messages is None):
        raise bad("Exactly one of prompt and messages is needed.", "prompt")
    info = await gateway.client.resolve(body.model)
    loaded = await gateway.client.tokenizer(info)
    if body.messages is not None:
        messages = body.messages
        text = await off_loop_if(
            len(messages) > 64,
            lambda: render_prompt(
                loaded.templates,
                messages,
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final=bool(body.continue_final_message),
                variables=body.chat_template_kwargs,
            ),
        )
        ids = await encode(loaded, text, bool(body.add_special_tokens))
    else:
        ids = await encode(loaded, body.prompt or "", body.add_special_tokens is not False)
    answer = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [loaded.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
    return Response(orjson.dumps(answer), media_type="application/json")


@router.post("/detokenize", **describe("Token ids to text", DetokenizeBody, ok="Text", errors=(404,)))
async def detokenize(request: Request) -> Response:
    gateway = gateway_of(request)
    settings = gateway.settings
    body = await parse_body(request, DetokenizeBody, settings.max_body_bytes, settings.body_timeout)
    info = await gateway.client.resolve(body.model)
    loaded = await gateway.client.tokenizer(info)
    ids = check_ids(body.tokens, info.vocab_size or loaded.tokenizer.vocab_size, "tokens")
    text = await off_loop_if(len(ids) > OFF_LOOP_CHARS, lambda: loaded.tokenizer.decode(ids, skip_special=False))
    return Response(orjson.dumps({"prompt": text}), media_type="application/json")
