"""Clients on a "host": HTTP through the gateway and gRPC through the router, each answer checked to its last byte.

    python -m tests.e2e.host_load --gateway http://10.77.0.12:8000 --router 10.77.0.13:8100

Writes a line of JSON every 0.2 s. SIGTERM: nothing new is begun, what runs is finished, and a last line has "over".
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
from collections import Counter
from typing import Any

import grpc
import httpx

from tandem import rpc
from tandem.inference.v1 import inference_pb2_grpc
from tests.router.harness import collect, request
from tests.router.mock_engine import expected

# What real engines are asked: their answers in calm are what they must be in a storm.
TOPICS = ("rivers", "a lighthouse", "prime numbers", "bread", "the moon", "trains")
# Longer than the longest outage of a test: nothing here may fail because a client lost patience.
PATIENCE_S = 180.0


class Load:
    """Some clients that ask and check, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.stopping = False
        self.done = 0
        self.open = 0
        self.failures: list[str] = []
        self.engines: Counter[str] = Counter()
        self.resumed = 0
        self.fleet: dict[str, str] = {}
        self.calm: dict[str, tuple[str, Any]] = {}

    async def client(self, number: int, http: httpx.AsyncClient, stub: Any) -> None:
        ways = [self.stream, self.plain, *([self.grpc] if stub is not None else [])]
        if self.options.model:
            ways = [self.chat]
        rng = random.Random(number)
        while not self.stopping:
            prompt = [number, *(rng.randrange(1000) for _ in range(rng.randrange(5, 80)))]
            way = ways[rng.randrange(len(ways))]
            self.open += 1
            try:
                wrong = await way(prompt, rng.randrange(5, self.options.tokens), rng.randrange(1, 10_000), http, stub)
            except (httpx.HTTPError, grpc.aio.AioRpcError, AssertionError) as error:
                wrong = f"{type(error).__name__}: {error}"[:500]
            self.open -= 1
            self.done += 1
            if wrong:
                self.failures.append(f"{way.__name__} of client {number}: {wrong}")

    async def stream(self, prompt: list[int], count: int, seed: int, http: httpx.AsyncClient, _stub: Any) -> str:
        text, reason, ended = "", None, False
        body = {"model": "mock", "prompt": prompt, "max_tokens": count, "temperature": 1, "seed": seed, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return f"{response.status_code} {(await response.aread()).decode()[:300]}"
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return f"error event {event}"
                for choice in event["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
        right = expected(prompt, count, seed)[1]
        if not ended or reason != "length":
            return f"cut off: {reason}, [DONE] {ended}, {len(text)} of {len(right)} characters"
        return "" if text == right else f"wrong text: {text[:80]!r} instead of {right[:80]!r}"

    async def plain(self, prompt: list[int], count: int, seed: int, http: httpx.AsyncClient, _stub: Any) -> str:
        body = {"model": "mock", "prompt": prompt, "max_tokens": count, "temperature": 1, "seed": seed, "n": 2}
        response = await http.post("/v1/completions", json=body)
        if response.status_code != 200:
            return f"{response.status_code} {response.text[:300]}"
        found = {choice["index"]: choice["text"] for choice in response.json()["choices"]}
        right = {index: expected(prompt, count, seed, index)[1] for index in range(2)}
        if response.json()["usage"]["completion_tokens"] != 2 * count:
            return f"usage {response.json()['usage']} instead of {2 * count} tokens"
        return "" if found == right else f"wrong text: {str(found)[:160]}"

    async def grpc(self, prompt: list[int], count: int, seed: int, _http: httpx.AsyncClient, stub: Any) -> str:
        message = request(prompt, count)
        message.sampling.seed = seed
        message.sampling.temperature = 1
        message.output.receipt = True
        # It fails by itself on a gap, a repeat, or anything after the usage.
        metadata = (("authorization", f"Bearer {self.options.token}"),)
        result = await collect(stub, message, timeout=PATIENCE_S, metadata=metadata)
        for accepted in result.accepted:
            self.engines[accepted.engine] += 1
        self.resumed += bool(result.usage) and result.usage[0].receipt.attempts > 1
        right = expected(prompt, count, seed)
        return "" if (result.ids.get(0), result.text.get(0)) == right and result.usage else "wrong ids or text"

    async def chat(self, prompt: list[int], count: int, seed: int, http: httpx.AsyncClient, _stub: Any) -> str:
        """A chat of a real engine, which must equal the one of the calm before."""
        topic = TOPICS[seed % len(TOPICS)]
        found = await self.chat_about(topic, http)
        return "" if found == self.calm[topic] else f"{topic}: {found} instead of {self.calm[topic]}"

    async def chat_about(self, topic: str, http: httpx.AsyncClient) -> tuple[str, Any]:
        """Text and finish reason. Half of them are sampled, the others greedy."""
        body: dict[str, Any] = {
            "model": self.options.model,
            "messages": [{"role": "user", "content": f"Tell me about {topic}."}],
            "max_tokens": self.options.tokens,
            "temperature": TOPICS.index(topic) % 2,
            "seed": 7,
            "stream": True,
        }
        text, reason = "", None
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return (await response.aread()).decode()[:300], response.status_code
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return text, event
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                        reason = choice["finish_reason"] or reason
        return text, reason

    async def watch(self, http: httpx.AsyncClient) -> None:
        """What the live page would show."""
        while True:
            try:
                answer = await http.get("/tandem/fleet")
                if answer.status_code == 200:
                    self.fleet = {one["address"]: one["state"] for one in answer.json()["engines"]}
            except httpx.HTTPError as error:
                self.failures.append(f"fleet: {type(error).__name__}: {error}")
            await asyncio.sleep(0.3)

    def tell(self, over: bool = False) -> None:
        names = ("done", "open", "failures", "engines", "resumed", "fleet")
        print(json.dumps({**{name: getattr(self, name) for name in names}, "over": over}), flush=True)

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(self, "stopping", True))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=self.options.gateway, timeout=PATIENCE_S, limits=limits, trust_env=False)
            )
            stub = None
            if self.options.router:
                channel = await stack.enter_async_context(rpc.channel(self.options.router))
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
            if self.options.model:
                self.calm = {topic: await self.chat_about(topic, http) for topic in TOPICS}
                assert {reason for _, reason in self.calm.values()} <= {"stop", "length"}, self.calm
            watching = asyncio.create_task(self.watch(http))
            clients = [asyncio.create_task(self.client(n, http, stub)) for n in range(self.options.clients)]
            while not all(client.done() for client in clients):
                self.tell()
                await asyncio.wait(clients, timeout=0.2)
            watching.cancel()
            # A bug of the clients themselves must not look like success.
            for client in clients:
                client.result()
            self.tell(over=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--router", default="")
    parser.add_argument("--token", default="")
    parser.add_argument("--model", default="", help="a real model: chats, instead of the mock engine's tokens")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=120)
    asyncio.run(Load(parser.parse_args()).run())


if __name__ == "__main__":
    main()
