"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.context import gateway_of
from gateway.docs import describe
from tandem.inference.v1 import inference_pb2 as pb

router = APIRouter()


def model_dict(name: str, info: pb.ModelInfo) -> dict[str, Any]:
    """OpenAI's model object, and what vLLM and we add to it."""
    return {
        "id": name,
        "object": "model",
        "created": info.created_unix_s,
        "owned_by": "tandem",
        "root": info.name,
        "parent": None,
        "max_model_len": info.max_model_len,
        "permission": [],
    }


@router.get("/v1/models", **describe("List the models served now", ok="ModelList"))
async def list_models(request: Request) -> Response:
    models = await gateway_of(request).client.models()
    entries = [model_dict(name, info) for info in models for name in (info.name, *info.aliases)]
    return Response(orjson.dumps({"object": "list", "data": entries}), media_type="application/json")


@router.get("/v1/models/{model:path}", **describe("One model", ok="Model", errors=(404,)))
async def get_model(model: str, request: Request) -> Response:
    info = await gateway_of(request).client.resolve(model)
    return Response(orjson.dumps(model_dict(model, info)), media_type="application/json")
