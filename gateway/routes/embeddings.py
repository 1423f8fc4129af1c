"""POST /v1/embeddings."""

from __future__ import annotations

import base64

import numpy as np
import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.body import parse_body
from gateway.context import context_of, gateway_of
from gateway.docs import describe
from gateway.errors import ApiError, bad
from gateway.params import check_ids, truncated
from gateway.schemas.tokens import EmbeddingBody
from gateway.text import account, admit, encode, run_plain, timeout_ms
from tandem.inference.v1 import inference_pb2 as pb

router = APIRouter()

_POOLING = {"mean": pb.POOLING_MEAN, "last": pb.POOLING_LAST}


@router.post("/v1/embeddings", **describe("Vectors of texts", EmbeddingBody, ok="EmbeddingList", errors=(404,)))
async def embeddings(request: Request) -> Response:
    gateway, context = gateway_of(request), context_of(request)
    settings = gateway.settings
    body = await parse_body(request, EmbeddingBody, settings.max_body_bytes, settings.body_timeout)
    inputs = body.input
    if len(inputs) > settings.max_prompts:
        raise bad(f"input holds {len(inputs)} inputs, but at most {settings.max_prompts} are allowed.", "input")
    info = await gateway.client.resolve(body.model)
    if body.dimensions is not None and body.dimensions != info.hidden_size:
        raise bad(f"dimensions is {body.dimensions}, but this model has {info.hidden_size}.", "dimensions")
    loaded = await gateway.client.tokenizer(info)
    message = pb.EmbedRequest(
        model=info.name,
        request_id=context.id,
        pooling=_POOLING[body.pooling or "mean"],
        normalize=body.normalize is not False,
        tokenizer_digest=loaded.digest,
    )
    for item in inputs:
        if isinstance(item, str):
            ids = await encode(loaded, item, body.add_special_tokens is not False)
        else:
            ids = check_ids(item, info.vocab_size or loaded.tokenizer.vocab_size, "input")
        ids = truncated(ids, body.truncate_prompt_tokens, info.max_model_len, 0)
        if not ids:
            raise bad("input holds an empty text: at least one token is needed.", "input")
        if len(ids) > info.max_model_len:
            raise ApiError(
                400,
                f"This model's maximum context length is {info.max_model_len} tokens, but an input has {len(ids)}.",
                param="input",
                code="context_length_exceeded",
            )
        message.inputs.add(ids=ids)
    total = sum(len(item.ids) for item in message.inputs)
    admit(gateway, context, info, total)
    limit = timeout_ms(request, gateway)
    limit_s = limit / 1000 if limit else None
    answer = await run_plain(request, gateway, lambda: gateway.client.embed(message, limit_s, context.span))
    account(gateway, context, [pb.Usage(prompt_tokens=answer.prompt_tokens)], ["stop"])
    as_base64 = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(one, as_base64)}
        for index, one in enumerate(answer.embeddings)
    ]
    result = {
        "object": "list",
        "data": data,
        "model": body.model or info.name,
        "usage": {"prompt_tokens": answer.prompt_tokens, "total_tokens": answer.prompt_tokens},
    }
    return Response(orjson.dumps(result), media_type="application/json")


def _vector(embedding: pb.Embedding, as_base64: bool) -> str | list[float]:
    """fp32 values, as numbers or as base64 of their little-endian bytes."""
    if not as_base64:
        return list(embedding.values)
    return base64.b64encode(np.asarray(embedding.values, dtype="<f4").tobytes()).decode()
