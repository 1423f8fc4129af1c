"""A Generate request on arrival: completed, checked, and as policies see it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np

from router.engine import Engine
from router.policies import Query
from tandem.block_hash import hash_chain
from tandem.errors import TandemError, invalid
from tandem.inference.v1 import inference_pb2 as pb

MAX_REQUEST_ID_BYTES = 256


def complete(request: pb.GenerateRequest, fallback_id: str) -> bytes:
    """Checks and fills in what the first service owes the request; returns it as bytes to append.

    Args:
        fallback_id: the caller's name for a request that has none; empty: one is drawn.

    Raises:
        TandemError: INVALID_FIELD.
    """
    if len(request.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise invalid("request_id", request.request_id, f"at most {MAX_REQUEST_ID_BYTES} bytes are allowed")
    if request.WhichOneof("prompt") is None:
        raise invalid("prompt", None, "token_ids or text must be set")
    extra = pb.GenerateRequest()
    if not request.request_id:
        extra.request_id = fallback_id[:64] or "req-" + secrets.token_hex(8)
    if not request.sampling.HasField("seed"):
        extra.sampling.seed = secrets.randbits(64)
    request.MergeFrom(extra)
    return extra.SerializeToString()


def check_possible(request: pb.GenerateRequest, query: Query, model: str, serving: Sequence[Engine]) -> None:
    """Refuses what none of the engines that serve this model can ever run.

    Raises:
        TandemError: CONTEXT_LENGTH or NEVER_FITS, with both numbers.
    """
    if request.HasField("text"):
        return
    engines = [engine for engine in serving if engine.model is not None]
    prompt, output = query.prompt_tokens, max(1, request.stop.max_tokens)
    longest = max((engine.load.max_model_len for engine in engines), default=0)
    if longest and prompt + output > longest:
        raise TandemError(
            "CONTEXT_LENGTH",
            f"the prompt has {prompt} tokens and max_tokens is {request.stop.max_tokens}, "
            f"but the context of {model} has {longest}",
            prompt_tokens=prompt,
            max_tokens=request.stop.max_tokens,
            max_model_len=longest,
        )
    needs = [
        (-(-(prompt + output) // max(1, engine.load.block_size)), engine.load.report.kv_blocks_total)
        for engine in engines
    ]
    if needs and all(pool and need > pool for need, pool in needs):
        need, pool = max(needs, key=lambda pair: pair[1])
        raise TandemError(
            "NEVER_FITS",
            f"the request needs {need} KV blocks, the largest engine has {pool}",
            need_blocks=need,
            pool_blocks=pool,
        )


def make_query(request: pb.GenerateRequest) -> Query:
    """What policies may know: length, and block hashes on demand. A text prompt has neither."""
    ids = request.token_ids.ids
    count = len(ids)
    start = 0
    if request.HasField("truncate_prompt_tokens"):
        start = max(0, count - request.truncate_prompt_tokens)
    salt = request.cache_salt.encode()

    def hasher(block_size: int) -> list[bytes]:
        return hash_chain(np.fromiter(ids, dtype="<u4", count=count)[start:], block_size, salt)

    return Query(request.request_id, count - start, request.stop.max_tokens, hasher if count else None)
