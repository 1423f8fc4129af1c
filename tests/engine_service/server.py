"""A real engine server in this process, on a Unix socket, over the fake model."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_service.engine import Engine
from engine_service.process import Process
from engine_service.settings import EngineSettings
from engine_service.speculation import NullSpeculation, SpeculationController
from tandem import rpc
from tandem.engine.v1 import engine_pb2_grpc
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tests.engine_service.fakes import FakeRunner, byte_tokenizer


@dataclass
class Answer:
    """A whole stream, and the checks that every stream must pass."""

    events: list[pb.GenerateEvent] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return [event.WhichOneof("event") for event in self.events]

    @property
    def accepted(self) -> pb.Accepted:
        return self.events[0].accepted

    @property
    def usage(self) -> pb.Usage:
        return self.events[-1].usage

    def deltas(self, choice: int = 0) -> list[pb.Delta]:
        return [e.delta for e in self.events if e.HasField("delta") and e.delta.choice == choice]

    def text(self, choice: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas(choice))

    def ids(self, choice: int = 0) -> list[int]:
        return [token for delta in self.deltas(choice) for token in delta.ids]

    def finished(self, choice: int = 0) -> pb.Finished:
        (found,) = [e.finished for e in self.events if e.HasField("finished") and e.finished.choice == choice]
        return found

    def check(self, tokens: int = 0, text_bytes: int = 0) -> Answer:
        """Order of events, and offsets without gap or overlap (from these for a resumed choice 0)."""
        kinds = self.kinds
        assert kinds[0] == "accepted" and kinds[-1] == "usage" and kinds.count("usage") == 1, kinds
        for choice in {e.finished.choice for e in self.events if e.HasField("finished")}:
            ids, size = (tokens, text_bytes) if choice == 0 else (0, 0)
            for delta in self.deltas(choice):
                assert (delta.token_offset, delta.text_offset) == (ids, size)
                ids += len(delta.ids)
                size += len(delta.text.encode())
        return self


class Server:
    def __init__(self, process: Process, engine: Engine, runner: FakeRunner, channel: grpc.aio.Channel) -> None:
        self.process = process
        self.engine = engine
        self.runner = runner
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.control = engine_pb2_grpc.EngineServiceStub(channel)

    def call(self, request: pb.GenerateRequest) -> Any:
        return self.inference.Generate(request)

    async def generate(self, request: pb.GenerateRequest) -> Answer:
        """The whole stream. Raises TandemError."""
        answer = Answer()
        try:
            async for response in self.call(request):
                answer.events.extend(response.events)
        except grpc.RpcError as error:
            raise TandemError.from_rpc(error) from error
        return answer

    async def serving(self, name: str = "") -> bool:
        stub = health_pb2_grpc.HealthStub(self.channel)
        status = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return status.status == health_pb2.HealthCheckResponse.SERVING

    async def idle(self) -> None:
        """Waits until the engine holds nothing any more."""
        await until(lambda: not self.engine.streams and not self.engine.loop.scheduler.requests)
        await asyncio.wrap_future(self.engine.loop.call(self.engine.loop.scheduler.check))
        assert self.engine.loop.scheduler.pool.num_used == 0


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


@contextlib.asynccontextmanager
async def serve(
    runner: FakeRunner | None = None, speculation: SpeculationController | None = None, **settings: Any
) -> AsyncIterator[Server]:
    runner = runner or FakeRunner()
    with tempfile.TemporaryDirectory(prefix="tdm", dir="/tmp") as folder:
        listen = f"unix:{Path(folder) / 'e'}"
        values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "prefill_chunk": 16, **settings}
        options = EngineSettings(listen=listen, engine_name="test", **values)

        def load(_settings: EngineSettings) -> Engine:
            return Engine(options, runner, byte_tokenizer(), speculation or NullSpeculation(), ("fake", "alias"))

        process = Process(options, load)
        await process.start()
        engine = await process.load()
        # A fixed window, so that a reader who stops is noticed soon.
        channel = rpc.channel(listen, extra=(("grpc.http2.bdp_probe", 0),))
        try:
            yield Server(process, engine, runner, channel)
        finally:
            runner.gate.set()
            await channel.close()
            await process.stop()


def ask(text: str = "hello", **fields: Any) -> pb.GenerateRequest:
    """A greedy request of a few tokens; fields are those of GenerateRequest."""
    sampling = fields.pop("sampling", pb.SamplingParams(temperature=0.0))
    stop = fields.pop("stop", pb.StopConditions(max_tokens=8))
    if "token_ids" not in fields:
        fields["text"] = text
    return pb.GenerateRequest(sampling=sampling, stop=stop, **fields)
