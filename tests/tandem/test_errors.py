"""Errors keep reason, details and retry time across a real gRPC call."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from tandem import rpc
from tandem.errors import REASONS, STATUS_OF, TandemError, abort, invalid
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc as pb_grpc


class _Failing(pb_grpc.InferenceServiceServicer):
    error: TandemError

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        await abort(context, self.error)


@pytest.fixture
async def failing() -> AsyncIterator[tuple[_Failing, pb_grpc.InferenceServiceStub]]:
    server, _ = rpc.server()
    servicer = _Failing()
    pb_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield servicer, pb_grpc.InferenceServiceStub(channel)
    await server.stop(None)


async def test_every_reason_crosses_the_wire(failing: tuple[_Failing, pb_grpc.InferenceServiceStub]) -> None:
    servicer, stub = failing
    for reason, code in STATUS_OF.items():
        servicer.error = TandemError(reason, f"because of {reason} – ü", retry_after_s=1.5, field="top_p")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(pb.GetModelInfoRequest())
        seen = TandemError.from_rpc(caught.value)
        assert (seen.reason, seen.code, seen.message) == (reason, code, f"because of {reason} – ü")
        assert (seen.retry_after_s, seen.field) == (1.5, "top_p")


async def test_a_foreign_error_keeps_its_code() -> None:
    async with rpc.channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pb_grpc.InferenceServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
    seen = TandemError.from_rpc(caught.value)
    assert (seen.reason, seen.code, seen.retry_after_s) == ("UNSPECIFIED", grpc.StatusCode.UNAVAILABLE, None)


def test_every_reason_has_a_status() -> None:
    assert set(STATUS_OF) == REASONS - {"UNSPECIFIED"}


def test_invalid_names_field_value_and_limit() -> None:
    error = invalid("top_p", 7.0, "must be in (0, 1]")
    assert error.message == "top_p is 7.0, but must be in (0, 1]"
    assert error.metadata == {"field": "top_p", "value": "7.0", "limit": "must be in (0, 1]"}
    assert len(invalid("stop", "x" * 10_000, "too long").message) < 200
