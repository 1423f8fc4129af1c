"""Errors that HTTP clients see: one type, one table from gRPC, two dialects (OpenAI's and Anthropic's)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import grpc
import orjson

from tandem.errors import TandemError

INVALID = "invalid_request_error"
SERVER = "server_error"
RATE = "rate_limit_error"

# gRPC reason → HTTP status, OpenAI type, OpenAI code.
REASONS: Mapping[str, tuple[int, str, str]] = {
    "INVALID_FIELD": (400, INVALID, "invalid_value"),
    "CONTEXT_LENGTH": (400, INVALID, "context_length_exceeded"),
    "NEVER_FITS": (400, INVALID, "context_length_exceeded"),
    "GRAMMAR": (400, INVALID, "invalid_grammar"),
    "MODEL_NOT_FOUND": (404, INVALID, "model_not_found"),
    "NO_ENGINE": (503, SERVER, "no_engine"),
    "TOKENIZER_MISMATCH": (503, SERVER, "model_changed"),
    "ENGINE_DRAINING": (503, SERVER, "overloaded"),
    "ENGINE_FULL": (503, SERVER, "overloaded"),
    "OVERLOADED": (503, SERVER, "overloaded"),
    "QUOTA": (429, RATE, "rate_limit_exceeded"),
    "DEADLINE": (504, SERVER, "timeout"),
    "ENGINE_CRASH": (500, SERVER, "engine_crash"),
    "NO_ALLOWED_TOKEN": (400, INVALID, "no_allowed_token"),
    "UNSUPPORTED": (400, INVALID, "unsupported_parameter"),
    "SLOW_READER": (503, SERVER, "slow_reader"),
    "INTERNAL": (500, SERVER, "internal_error"),
    "UNAUTHENTICATED": (500, SERVER, "internal_error"),
}
# gRPC status without our reason → the same, and the message that is told instead of theirs.
CODES: Mapping[grpc.StatusCode, tuple[int, str, str, str]] = {
    grpc.StatusCode.UNAVAILABLE: (503, SERVER, "unavailable", "The model's servers cannot be reached now."),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, SERVER, "timeout", "The request took longer than it may."),
    grpc.StatusCode.CANCELLED: (503, SERVER, "cancelled", "The request was cancelled by the server."),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (413, INVALID, "request_too_large", "The request is too large."),
    grpc.StatusCode.UNIMPLEMENTED: (400, INVALID, "unsupported", "This model's server does not offer that."),
    grpc.StatusCode.INVALID_ARGUMENT: (400, INVALID, "invalid_value", "The request is not valid."),
    grpc.StatusCode.NOT_FOUND: (404, INVALID, "not_found", "What the request names does not exist."),
    grpc.StatusCode.ABORTED: (503, SERVER, "unavailable", "The request was interrupted."),
}
_FALLBACK = (500, SERVER, "internal_error", "The server failed; the request id is in its logs.")
# Reasons whose text may hold what clients should not see.
_OPAQUE = {"INTERNAL": _FALLBACK[3], "UNAUTHENTICATED": _FALLBACK[3], "UNSPECIFIED": _FALLBACK[3]}

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error with its HTTP form. `param` names the request field to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.extra_headers = dict(headers or {})
        if retry_after_s is None and status in (429, 503):
            self.retry_after_s = 1.0

    def headers(self) -> dict[str, str]:
        result = dict(self.extra_headers)
        if self.retry_after_s is not None and self.status in (429, 503):
            result["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return result

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def to_anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body(self, anthropic: bool = False) -> bytes:
        return orjson.dumps(self.to_anthropic() if anthropic else self.to_dict())


def bad(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A 400."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """A 400 for a field that would change the answer and cannot be honoured."""
    return ApiError(400, f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def internal() -> ApiError:
    """A 500 that tells nothing internal."""
    return ApiError(_FALLBACK[0], _FALLBACK[3], kind=_FALLBACK[1], code=_FALLBACK[2])


def shutting_down() -> ApiError:
    """A 503 for what the server's stop cuts off."""
    return ApiError(503, "The server is shutting down.", kind=SERVER, code="shutting_down", retry_after_s=5.0)


def from_tandem(error: TandemError) -> ApiError:
    """The HTTP form of an error that came over gRPC or was raised by shared code."""
    entry = REASONS.get(error.reason)
    if entry is None:
        status, kind, code, message = CODES.get(error.code, _FALLBACK)
        return ApiError(status, message, kind=kind, code=code, retry_after_s=error.retry_after_s)
    status, kind, code = entry
    message = _OPAQUE.get(error.reason, error.message) or code.replace("_", " ")
    param = error.field.rsplit(".", 1)[-1] if error.field else None
    if error.reason == "MODEL_NOT_FOUND":
        param = "model"
    return ApiError(status, message, kind=kind, param=param, code=code, retry_after_s=error.retry_after_s)


def from_rpc(error: grpc.RpcError) -> ApiError:
    return from_tandem(TandemError.from_rpc(error))
