"""Addresses, health and reflection."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem import rpc


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("unix:/a/b", "unix:/a/b"),
        ("unix:///a/b", "unix:/a/b"),
        ("[::1]:1", "[::1]:1"),
    ],
)
def test_good_addresses(given: str, target: str) -> None:
    assert rpc.check_address(given) == target


@pytest.mark.parametrize("given", ["", "host", "host:", ":1", "host:x", "host:70000", "unix:/" + "x" * 110])
def test_bad_addresses_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"neither host:port nor unix:/path|over the limit of 103"):
        rpc.check_address(given)


async def test_health_and_reflection_over_a_unix_socket(tmp_path: Path) -> None:
    server, health = rpc.server()
    rpc.add_reflection(server, "tandem.inference.v1.InferenceService")
    address = f"unix:{tmp_path}/s"
    server.add_insecure_port(address)
    await server.start()
    async with rpc.channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        serving = health_pb2.HealthCheckResponse
        await health.set(False)
        assert (await check(health_pb2.HealthCheckRequest())).status == serving.NOT_SERVING
        await health.set(True)
        assert (await check(health_pb2.HealthCheckRequest())).status == serving.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await check(health_pb2.HealthCheckRequest(service="absent"))
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await stream.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"tandem.inference.v1.InferenceService", "grpc.health.v1.Health"} <= names
        await stream.done_writing()
    await server.stop(None)
