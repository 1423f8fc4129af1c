"""A router and mock engines for tests, and a client that checks what a stream must look like."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from router.server import RouterServer
from router.settings import RouterSettings
from tandem import rpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.router.v1 import router_pb2_grpc
from tests.router.mock_engine import MockConfig, MockEngine


@dataclass
class Cluster:
    """A running router with its engines."""

    router: RouterServer
    engines: list[MockEngine]
    channel: grpc.aio.Channel
    admin_channel: grpc.aio.Channel
    stub: Any = None
    admin: Any = None

    def __post_init__(self) -> None:
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = router_pb2_grpc.RouterAdminServiceStub(self.admin_channel)

    def engine(self, index: int = 0) -> Any:
        """The router's view of an engine."""
        return self.router.fleet.engines[self.engines[index].address]


@contextlib.asynccontextmanager
async def router_for(addresses: str, **settings: object) -> AsyncIterator[RouterServer]:
    values: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "engines": addresses,
        "load_interval_ms": 50,
        "retry_jitter_ms": 5,
        **settings,
    }
    router = RouterServer(RouterSettings(**values))  # type: ignore[arg-type]
    await router.start()
    try:
        yield router
    finally:
        await router.stop(0)


@contextlib.asynccontextmanager
async def cluster(
    count: int = 2, config: MockConfig | None = None, wait: bool = True, **settings: object
) -> AsyncIterator[Cluster]:
    """A router with `count` engines, all ready."""
    engines = [
        await MockEngine("127.0.0.1:0", MockConfig(**vars(config or MockConfig()))).start() for _ in range(count)
    ]
    try:
        async with (
            router_for(",".join(engine.address for engine in engines), **settings) as router,
            rpc.channel(router.address) as channel,
            rpc.channel(router.admin_address) as admin,
        ):
            result = Cluster(router, engines, channel, admin)
            if wait:
                await until(
                    lambda: sum(not e.excluded(time.monotonic()) for e in router.fleet.engines.values()) == count
                )
                if (config or MockConfig()).kv_events:
                    await until(lambda: all(e.feed.live for e in router.fleet.engines.values()))
            yield result
    finally:
        for engine in engines:
            await engine.stop()


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Waits until the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("the condition never came true")
        await asyncio.sleep(0.01)


@dataclass
class Result:
    """What a client received."""

    accepted: list[pb.Accepted] = field(default_factory=list)
    prompts: int = 0
    ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[int]] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    usage: list[pb.Usage] = field(default_factory=list)
    messages: int = 0

    def take(self, response: pb.GenerateResponse) -> None:
        """Adds a message; fails on a gap, a repeat or anything after the usage."""
        self.messages += 1
        for event in response.events:
            assert not self.usage, "an event after usage"
            kind = event.WhichOneof("event")
            if kind == "accepted":
                self.accepted.append(event.accepted)
            elif kind == "prompt":
                self.prompts += 1
            elif kind == "delta":
                delta = event.delta
                ids = self.ids.setdefault(delta.choice, [])
                text = self.text.get(delta.choice, "")
                assert delta.token_offset == len(ids), f"token {delta.token_offset} after {len(ids)}"
                assert not delta.text or delta.text_offset == len(text.encode())
                ids.extend(delta.ids)
                self.text[delta.choice] = text + delta.text
                self.logprobs.setdefault(delta.choice, []).extend(score.id for score in delta.logprobs)
            elif kind == "finished":
                self.finished.append(event.finished.choice)
            elif kind == "usage":
                self.usage.append(event.usage)


def request(prompt: list[int], max_tokens: int = 8, **fields: Any) -> pb.GenerateRequest:
    result = pb.GenerateRequest(model="mock", token_ids=pb.TokenIds(ids=prompt), **fields)
    result.stop.max_tokens = max_tokens
    return result


async def collect(
    stub: Any, message: pb.GenerateRequest, on_message: Callable[[Result], Any] | None = None, **call: Any
) -> Result:
    """Reads a whole stream. `on_message` may disturb things in between (it may be async)."""
    result = Result()
    async for response in stub.Generate(message, **call):
        result.take(response)
        if on_message is not None:
            wait = on_message(result)
            if asyncio.iscoroutine(wait):
                await wait
    return result
