"""One error type for all services, and its form on the wire.

Errors cross gRPC as a status with `google.rpc.ErrorInfo` (domain "tandem", reason = name of an ErrorReason without
its prefix) and `google.rpc.RetryInfo` where waiting helps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn, Protocol, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from tandem.inference.v1 import inference_pb2 as pb

DOMAIN = "tandem"
_PREFIX = "ERROR_REASON_"
REASONS = frozenset(name.removeprefix(_PREFIX) for name in pb.ErrorReason.DESCRIPTOR.values_by_name)

# The gRPC status that goes with each reason.
STATUS_OF = {
    "INVALID_FIELD": grpc.StatusCode.INVALID_ARGUMENT,
    "CONTEXT_LENGTH": grpc.StatusCode.INVALID_ARGUMENT,
    "NEVER_FITS": grpc.StatusCode.INVALID_ARGUMENT,
    "GRAMMAR": grpc.StatusCode.INVALID_ARGUMENT,
    "MODEL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "NO_ENGINE": grpc.StatusCode.UNAVAILABLE,
    "TOKENIZER_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "ENGINE_DRAINING": grpc.StatusCode.UNAVAILABLE,
    "ENGINE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "OVERLOADED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "QUOTA": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "DEADLINE": grpc.StatusCode.DEADLINE_EXCEEDED,
    "ENGINE_CRASH": grpc.StatusCode.INTERNAL,
    "NO_ALLOWED_TOKEN": grpc.StatusCode.FAILED_PRECONDITION,
    "UNSUPPORTED": grpc.StatusCode.UNIMPLEMENTED,
    "SLOW_READER": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
}


class TandemError(Exception):
    """An error that a caller should see: a reason, a clear message, details, and when to try again."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        retry_after_s: float | None = None,
        **metadata: object,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.code = code or STATUS_OF.get(reason, grpc.StatusCode.UNKNOWN)
        self.retry_after_s = retry_after_s
        self.metadata = {key: str(value) for key, value in metadata.items()}

    @property
    def field(self) -> str | None:
        """Name of the request field that is to blame, if one is."""
        return self.metadata.get("field")

    def to_status(self) -> Status:
        """The google.rpc.Status that carries this error."""
        status = Status(code=self.code.value[0], message=self.message)
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)
        _pack(status, info)
        if self.retry_after_s is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(int(self.retry_after_s * 1000))
            _pack(status, retry)
        return status

    @classmethod
    def from_rpc(cls, error: grpc.RpcError) -> TandemError:
        """Reads any RPC error; one that is not ours gets reason UNSPECIFIED and keeps its code."""
        call = cast(grpc.Call, error)
        code, message = call.code() or grpc.StatusCode.UNKNOWN, call.details() or ""
        try:
            # The helper accepts sync and aio errors alike: it reads code, details and trailing metadata.
            status = rpc_status.from_call(cast(grpc.Call, _Trailing(call)))
        except ValueError:
            status = None
        reason, metadata, retry = "UNSPECIFIED", {}, None
        for detail in status.details if status else ():
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo()
                detail.Unpack(info)
                if info.domain == DOMAIN:
                    reason, metadata = info.reason, dict(info.metadata)
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                info_retry = error_details_pb2.RetryInfo()
                detail.Unpack(info_retry)
                retry = info_retry.retry_delay.ToMilliseconds() / 1000
        result = cls(reason, message, code=code, retry_after_s=retry)
        result.metadata = metadata
        return result


class _Trailing:
    """Gives aio errors (whose trailing metadata is an aio Metadata) the shape that grpc_status expects."""

    def __init__(self, call: grpc.Call) -> None:
        self._call = call

    def code(self) -> grpc.StatusCode:
        return self._call.code()

    def details(self) -> str:
        return self._call.details() or ""

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return tuple((key, value) for key, value in (self._call.trailing_metadata() or ()))


def _pack(status: Status, message: object) -> None:
    detail = AnyMessage()
    detail.Pack(message)  # type: ignore[arg-type]
    status.details.append(detail)


def invalid(field: str, value: object, limit: str) -> TandemError:
    """A bad value: names the field, the value that was given and what is allowed."""
    shown = repr(value)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return TandemError("INVALID_FIELD", f"{field} is {shown}, but {limit}", field=field, value=shown, limit=limit)


class Abortable(Protocol):
    """What can end a call with a status, besides gRPC's own contexts."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Iterable[Any] = ()) -> NoReturn: ...


async def abort(context: grpc.aio.ServicerContext | Abortable, error: TandemError) -> NoReturn:
    """Ends an aio call with this error and all its details."""
    status = rpc_status.to_status(error.to_status())
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort raises")
