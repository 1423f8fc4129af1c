"""What gRPC says of a call, on a span."""

from __future__ import annotations

import grpc

from tandem.errors import TandemError
from tandem.tracing import Span, names

# The conventions count these as errors of a server; others are answers.
_OURS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


def call(span: Span, method: str) -> None:
    """The attributes of any call of ours: `method` is the full name without a leading slash."""
    span.set({names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method, names.PROVIDER_NAME: names.PROVIDER})


def done(span: Span) -> None:
    """The call ended well."""
    span.set({names.RPC_STATUS: "OK"})


def failed(span: Span, error: TandemError) -> None:
    """The call ended with this error: its reason, or the status' name if it has none of ours."""
    if not span.recording:
        return
    span.set({names.RPC_STATUS: error.code.name})
    span.fail(error.reason if error.reason != "UNSPECIFIED" else error.code.name, ours=error.code in _OURS)


def cancelled(span: Span) -> None:
    """The caller hung up."""
    span.set({names.RPC_STATUS: grpc.StatusCode.CANCELLED.name, names.OUTCOME: "cancelled"})
