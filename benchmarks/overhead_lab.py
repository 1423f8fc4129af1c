"""The processes and clients of benchmarks.overhead: a mock engine, a router, gateways, gRPC and HTTP clients.

The engine streams tokens at a fixed beat, all its streams in step as a real engine's are, from prepared bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from tandem import rpc
from tandem.engine.v1 import engine_pb2 as epb
from tandem.engine.v1 import engine_pb2_grpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.many import CallContext, ManyServer

MODEL = "mock"
TOKENIZER_OF = "smollm2-135m-instruct"
INFERENCE = "tandem.inference.v1.InferenceService"
READY_S = 60.0


class BenchEngine(inference_pb2_grpc.InferenceServiceServicer, engine_pb2_grpc.EngineServiceServicer):
    """Streams prepared bytes in step; costs as little as a Python server can."""

    def __init__(self, tokens: int, step_s: float) -> None:
        from tandem.models.store import resolve
        from tandem.tokenizer import load_bundle

        self._tokens = tokens
        self._step_s = step_s
        self._tick = asyncio.Condition()
        self._bundle = load_bundle(resolve(TOKENIZER_OF).path)
        self._model = pb.ModelInfo(
            name=MODEL,
            tokenizer_digest=self._bundle.digest,
            block_size=16,
            max_model_len=8192,
            vocab_size=49152,
            numerics_id="bench",
        )

    async def beat(self) -> None:
        """The step loop: wakes all streams at once."""
        due = time.monotonic()
        while True:
            due = max(due + self._step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            async with self._tick:
                self._tick.notify_all()

    async def generate(self, raw: bytes, context: grpc.aio.ServicerContext | CallContext) -> None:
        """Generate as bytes. The first token comes with the first beat after the call."""
        accepted = pb.GenerateEvent(accepted=pb.Accepted(seed=1, prompt_tokens=100, numerics_id="bench"))
        await context.write(pb.GenerateResponse(events=[accepted]).SerializeToString())
        for number in range(self._tokens):
            async with self._tick:
                await self._tick.wait()
            delta = pb.Delta(token_offset=number, text_offset=6 * number, ids=[number + 1000], text=" token")
            await context.write(pb.GenerateResponse(events=[pb.GenerateEvent(delta=delta)]).SerializeToString())
        finished = pb.GenerateEvent(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH))
        usage = pb.GenerateEvent(usage=pb.Usage(prompt_tokens=100, completion_tokens=self._tokens))
        await context.write(pb.GenerateResponse(events=[finished, usage]).SerializeToString())

    async def list_models(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._model])

    async def get_tokenizer(self, request: pb.GetTokenizerRequest, context: Any) -> pb.GetTokenizerResponse:
        return self._bundle.to_proto()

    async def WatchLoad(
        self, request: epb.WatchLoadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[epb.WatchLoadResponse]:
        sequence = 0
        while True:
            sequence += 1
            yield epb.WatchLoadResponse(
                epoch=1,
                sequence=sequence,
                state=epb.ENGINE_STATE_READY,
                steps=sequence,
                model=self._model,
                max_num_seqs=256,
                kv_blocks_total=10_000,
            )
            await asyncio.sleep((request.interval_ms or 250) / 1000)


async def serve_engine(address: str, tokens: int, step_s: float) -> None:
    """Serves a BenchEngine for ever."""
    server, health = rpc.server()
    engine = BenchEngine(tokens, step_s)
    handlers: dict[str, Any] = {
        "Generate": grpc.unary_stream_rpc_method_handler(engine.generate),
        "GenerateMany": grpc.stream_stream_rpc_method_handler(
            ManyServer(engine.generate).serve,
            pb.GenerateManyRequest.FromString,
            pb.GenerateManyResponse.SerializeToString,
        ),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            engine.list_models, pb.ListModelsRequest.FromString, pb.ListModelsResponse.SerializeToString
        ),
        "GetTokenizer": grpc.unary_unary_rpc_method_handler(
            engine.get_tokenizer, pb.GetTokenizerRequest.FromString, pb.GetTokenizerResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, handlers),))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)
    server.add_insecure_port(address)
    await health.set(True)
    await server.start()
    await engine.beat()


def serve_router(address: str, engines: str, policy: str) -> int:
    from router.main import run
    from router.settings import RouterSettings

    return run(RouterSettings(listen=address, admin_listen="", engines=engines, policy=policy, log_level="warning"))


def serve_gateway(upstream: str, port: int) -> int:
    from gateway.main import run
    from gateway.settings import GatewaySettings

    return run(GatewaySettings(port=port, router=upstream, log_level="warning", grace=1))


# -- clients: (seconds to the first token, gaps between messages with tokens in seconds, number of such messages)

Stream = tuple[float, list[float], int]


async def grpc_stream(stub: inference_pb2_grpc.InferenceServiceStub, number: int, tokens: int) -> Stream:
    """One Generate call."""
    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=range(number, number + 100)))
    request.stop.max_tokens = tokens
    began = time.perf_counter()
    first, last, gaps = 0.0, 0.0, []
    messages = 0
    async for response in stub.Generate(request):
        now = time.perf_counter()
        if any(event.HasField("delta") for event in response.events):
            messages += 1
            if first:
                gaps.append(now - last)
            first, last = first or now - began, now
    return first, gaps, messages


def chat_request(number: int, stream: bool, tokens: int) -> bytes:
    """An HTTP/1.1 chat request of about 110 prompt tokens."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{number} " + "word " * 100}],
            "stream": stream,
            "max_tokens": tokens,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class HttpClient:
    """A keep-alive connection that asks for chats."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def stream(self, number: int, tokens: int) -> Stream:
        """One streamed chat. A message is what one read of the socket gave."""
        assert self._reader is not None and self._writer is not None
        began = time.perf_counter()
        self._writer.write(chat_request(number, True, tokens))
        first, last, gaps, messages = 0.0, 0.0, [], 0
        tail = b""
        while True:
            data = await self._reader.read(65536)
            if not data:
                raise RuntimeError(f"the gateway closed the connection after {tail!r}")
            now = time.perf_counter()
            if b'"content":" token"' in data:
                messages += 1
                if first:
                    gaps.append(now - last)
                first, last = first or now - began, now
            tail = (tail + data)[-64:]
            if tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                return first, gaps, messages

    async def plain(self, number: int, tokens: int) -> Stream:
        """One whole chat; its first token is its answer."""
        assert self._reader is not None and self._writer is not None
        began = time.perf_counter()
        self._writer.write(chat_request(number, False, tokens))
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(head.decode())
        await self._reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        return time.perf_counter() - began, [], 1


# -- processes


@dataclass(frozen=True)
class Lab:
    """Addresses and process ids of what was started."""

    engine: str
    router: str
    gateway_port: int
    chain_port: int
    pids: dict[str, int]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, over its threads; in nanoseconds where Linux tells them."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except OSError:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def lab(tokens: int, step_ms: float, policy: str) -> Iterator[Lab]:
    """An engine, a router on it, a gateway on the engine and a gateway on the router; ended on leaving."""
    me = [sys.executable, "-m", "benchmarks.overhead"]
    with tempfile.TemporaryDirectory(prefix="tb") as folder:
        engine, router = f"unix:{folder}/e", f"unix:{folder}/r"
        ports = free_port(), free_port()
        commands = {
            "engine": ["--engine", engine, "--tokens", str(tokens), "--step-ms", str(step_ms)],
            "router": ["--router", router, "--engines", engine, "--policy", policy],
            "gateway": ["--gateway", engine, "--port", str(ports[0])],
            "chain": ["--gateway", router, "--port", str(ports[1])],
        }
        children = {name: subprocess.Popen([*me, *command]) for name, command in commands.items()}
        try:
            yield Lab(engine, router, *ports, {name: child.pid for name, child in children.items()})
        finally:
            for child in children.values():
                child.terminate()
            for child in children.values():
                child.wait(10)


async def wait_ready(address: str) -> None:
    """Waits until a model is listed.

    Raises:
        TimeoutError: none was within READY_S.
    """
    async with rpc.channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if (await stub.ListModels(pb.ListModelsRequest())).models:
                    return
            await asyncio.sleep(0.1)
    raise TimeoutError(f"{address} lists no model after {READY_S:g} s")


async def wait_http(port: int) -> None:
    """Waits until a chat is answered.

    Raises:
        TimeoutError: none was within READY_S.
    """
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        client = HttpClient(port)
        try:
            await client.open()
            await client.plain(0, 1)
            return
        except (OSError, RuntimeError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.1)
        finally:
            client.close()
    raise TimeoutError(f"port {port} does not answer after {READY_S:g} s")
