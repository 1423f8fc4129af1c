"""A mock engine that speaks the real protocol: deterministic tokens, a prefix cache with events, faults on command.

The next token is a hash of everything before it (and of seed and choice, unless greedy), so any lost, doubled or
altered token changes all that follow. Runs in the test's process, or as its own: python -m tests.router.mock_engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from tandem import rpc
from tandem.block_hash import SCHEME, hash_chain
from tandem.engine.v1 import engine_pb2 as epb
from tandem.engine.v1 import engine_pb2_grpc
from tandem.errors import TandemError, abort
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.many import CallContext, ManyServer

VOCAB = 1000
# Characters of one to four UTF-8 bytes, so that byte offsets and character counts differ.
LETTERS = "aé漢🙂"


def next_token(prefix: list[int], seed: int, choice: int, greedy: bool) -> int:
    key = (0, 0) if greedy else (seed, choice)
    state = hashlib.blake2b(struct.pack(f"<QI{len(prefix)}I", *key, *prefix), digest_size=8)
    return int.from_bytes(state.digest(), "little") % VOCAB


def token_text(token: int) -> str:
    return f"{LETTERS[token % 4]}{token} "


def expected(
    prompt: list[int], count: int, seed: int = 0, choice: int = 0, greedy: bool = False
) -> tuple[list[int], str]:
    """Tokens and text of an undisturbed run."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, choice, greedy))
    output = tokens[len(prompt) :]
    return output, "".join(map(token_text, output))


@dataclass
class MockConfig:
    """How the engine behaves. All fields may be changed while it runs."""

    model: str = "mock"
    aliases: tuple[str, ...] = ("mock-alias",)
    numerics_id: str = "num-1"
    tokenizer_digest: str = "tok-1"
    block_size: int = 16
    blocks: int = 4096
    max_model_len: int = 100_000
    max_num_seqs: int = 64
    max_waiting: int = 8
    prefill_s_per_token: float = 0.0
    step_s: float = 0.002
    kv_events: bool = True
    # Whether it serves many calls on one stream.
    many: bool = True
    # Every step's text is held back and sent only with every n-th token.
    text_every: int = 1
    # A request whose first prompt token is this kills the engine when it has sent so many tokens.
    poison: int = -1
    die_after: int = 0
    # Tokens after which the engine hangs; -1 never.
    hang_after: int = -1
    # Answers to the next calls, before anything else.
    refuse: list[TandemError] = field(default_factory=list)


class MockEngine(inference_pb2_grpc.InferenceServiceServicer, engine_pb2_grpc.EngineServiceServicer):
    """One engine. `start`, then `kill` (as if by signal 9) or `stop`."""

    def __init__(self, address: str, config: MockConfig | None = None) -> None:
        self.address = address
        self.config = config or MockConfig()
        self.epoch = int.from_bytes(os.urandom(7), "little")
        self.state = epb.ENGINE_STATE_READY
        self.running = 0
        self.waiting = 0
        self.pending_tokens = 0
        self.steps = 0
        self.calls: list[pb.GenerateRequest] = []
        self.finished_calls = 0
        self.cancelled_calls = 0
        self.cached: OrderedDict[bytes, None] = OrderedDict()
        self.events: list[epb.KvEvent] = []
        self.subscribers: set[asyncio.Queue[epb.SubscribeKvEventsResponse]] = set()
        self.subscriptions: list[tuple[int, int]] = []
        self.drop_events = 0
        self.resumed = asyncio.Event()
        self.resumed.set()
        self.draining = asyncio.Event()
        self._many = ManyServer(self._answer, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString)
        self._slots = asyncio.Semaphore(self.config.max_num_seqs)
        self._dead = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self.health: rpc.Health | None = None

    async def start(self) -> MockEngine:
        self._server, self.health = rpc.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.address)
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await self.health.set(True)
        await self._server.start()
        return self

    async def stop(self) -> None:
        self._dead.set()
        self.resumed.set()
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    kill = stop

    def hang(self) -> None:
        self.resumed.clear()

    def wake(self) -> None:
        self.resumed.set()

    # -- inference

    async def GenerateMany(
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> None:
        if not self.config.many:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older engine")
        await self._many.serve(request_iterator, context)

    async def _answer(self, request: pb.GenerateRequest, context: CallContext) -> None:
        async with contextlib.aclosing(self.Generate(request, context)) as answer:
            async for message in answer:
                await context.write(message)

    def info(self) -> pb.ModelInfo:
        config = self.config
        return pb.ModelInfo(
            name=config.model,
            aliases=config.aliases,
            model_digest="model-1",
            tokenizer_digest=config.tokenizer_digest,
            max_model_len=config.max_model_len,
            vocab_size=VOCAB,
            numerics_id=config.numerics_id,
            batch_invariant=True,
            block_size=config.block_size,
            max_n=8,
        )

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.calls.append(request)
        if self.config.refuse:
            await abort(context, self.config.refuse.pop(0))
        if self.state == epb.ENGINE_STATE_DRAINING:
            await abort(context, TandemError("ENGINE_DRAINING", "draining"))
        if self.running + self.waiting >= self.config.max_num_seqs + self.config.max_waiting:
            await abort(context, TandemError("ENGINE_FULL", "full", retry_after_s=0.1))
        done = False
        try:
            async for event in self._events(request):
                yield pb.GenerateResponse(events=[event])
            done = True
        except TandemError as error:
            done = True
            await abort(context, error)
        finally:
            self.finished_calls += done
            self.cancelled_calls += not done

    async def _events(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateEvent]:
        config = self.config
        prompt = list(request.token_ids.ids) or [ord(letter) for letter in request.text]
        salt = request.cache_salt.encode()
        hashes = hash_chain(prompt, config.block_size, salt)
        matched = 0
        for key in hashes:
            if key not in self.cached:
                break
            matched += 1
            self.cached.move_to_end(key)
        cached = min(matched * config.block_size, len(prompt) - 1)
        resume = request.resume if request.HasField("resume") else None
        yield pb.GenerateEvent(
            accepted=pb.Accepted(
                seed=request.sampling.seed,
                prompt_tokens=len(prompt),
                cached_tokens=cached,
                numerics_id=config.numerics_id,
                epoch=self.epoch,
                model=config.model,
                engine=self.address,
                exact_resume=resume is not None and resume.numerics_id == config.numerics_id,
            )
        )
        uncached = len(prompt) - cached
        self.waiting += 1
        self.pending_tokens += uncached
        try:
            async with self._slots:
                self.waiting -= 1
                self.running += 1
                try:
                    await self._prefill(uncached)
                    self._store(hashes)
                    async for event in self._decode(request, prompt, cached):
                        yield event
                finally:
                    self.running -= 1
                    self.waiting += 1
        finally:
            self.waiting -= 1
            self.pending_tokens -= uncached

    async def _prefill(self, tokens: int) -> None:
        await self._pause(tokens * self.config.prefill_s_per_token)
        self.steps += 1

    async def _pause(self, seconds: float) -> None:
        await self.resumed.wait()
        if seconds:
            await asyncio.sleep(seconds)

    async def _decode(
        self, request: pb.GenerateRequest, prompt: list[int], cached: int
    ) -> AsyncIterator[pb.GenerateEvent]:
        config = self.config
        greedy = request.sampling.HasField("temperature") and request.sampling.temperature == 0
        choices = request.n or 1
        outputs: list[list[int]] = [[] for _ in range(choices)]
        sent = [0] * choices
        over = [False] * choices
        if request.output.HasField("prompt_logprobs"):
            yield pb.GenerateEvent(prompt=pb.PromptScores(tokens=[_score(token) for token in prompt]))
        for old in request.resume.choices:
            outputs[old.index] = list(old.emitted_ids)
            sent[old.index] = old.text_bytes_sent
            over[old.index] = old.finished
        made = 0
        while not all(over):
            await self._pause(config.step_s)
            if self._dead.is_set():
                raise TandemError("UNSPECIFIED", "Socket closed", code=grpc.StatusCode.UNAVAILABLE)
            if self.state == epb.ENGINE_STATE_DRAINING and self.draining.is_set():
                raise TandemError("ENGINE_DRAINING", "end of grace")
            self.steps += 1
            for choice in range(choices):
                if over[choice]:
                    continue
                if config.poison == prompt[0] and made >= config.die_after:
                    asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.kill()))
                    await asyncio.sleep(3600)
                if made == config.hang_after:
                    self.hang()
                    await self._pause(0)
                output = outputs[choice]
                limit = request.stop.max_tokens
                if len(output) < limit:
                    token = next_token(prompt + output, request.sampling.seed, choice, greedy)
                    output.append(token)
                    made += 1
                    last = len(output) >= limit
                    yield pb.GenerateEvent(delta=self._delta(request, choice, output, sent, last))
                if len(output) >= limit:
                    over[choice] = True
                    yield pb.GenerateEvent(finished=pb.Finished(choice=choice, reason=pb.FINISH_REASON_LENGTH))
        usage = pb.Usage(prompt_tokens=len(prompt), completion_tokens=sum(map(len, outputs)), cached_tokens=cached)
        if request.output.receipt:
            usage.receipt.attempts = request.attempt
            usage.receipt.seed = request.sampling.seed
        yield pb.GenerateEvent(usage=usage)

    def _delta(
        self, request: pb.GenerateRequest, choice: int, output: list[int], sent: list[int], last: bool
    ) -> pb.Delta:
        text = ""
        if last or len(output) % self.config.text_every == 0:
            whole = "".join(map(token_text, output)).encode()
            text = whole[sent[choice] :].decode()
        delta = pb.Delta(
            choice=choice, token_offset=len(output) - 1, text_offset=sent[choice], ids=output[-1:], text=text
        )
        sent[choice] += len(text.encode())
        if request.output.HasField("logprobs"):
            delta.logprobs.append(_score(output[-1]))
        return delta

    def _store(self, hashes: list[bytes]) -> None:
        fresh = [key for key in hashes if key not in self.cached]
        for key in fresh:
            self.cached[key] = None
        removed = []
        while len(self.cached) > self.config.blocks:
            removed.append(self.cached.popitem(last=False)[0])
        events = []
        if fresh:
            events.append(epb.KvEvent(stored=epb.KvStored(hashes=b"".join(fresh))))
        if removed:
            events.append(epb.KvEvent(removed=epb.KvRemoved(hashes=b"".join(removed))))
        self._publish(events)

    def _publish(self, events: list[epb.KvEvent]) -> None:
        if not events:
            return
        self.events.extend(events)
        if self.drop_events:
            self.drop_events -= 1
            return
        message = epb.SubscribeKvEventsResponse(epoch=self.epoch, number=len(self.events), events=events)
        for queue in self.subscribers:
            queue.put_nowait(message)

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedResponse:
        return pb.EmbedResponse(
            embeddings=[pb.Embedding(values=[float(len(item.ids))]) for item in request.inputs],
            prompt_tokens=sum(len(item.ids) for item in request.inputs),
        )

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTokenizerResponse:
        return pb.GetTokenizerResponse(digest=self.config.tokenizer_digest, tokenizer_json=b"{}")

    # -- engine

    def report(self, sequence: int) -> epb.WatchLoadResponse:
        return epb.WatchLoadResponse(
            epoch=self.epoch,
            sequence=sequence,
            state=self.state,
            running=self.running,
            waiting=self.waiting,
            uncached_waiting_tokens=self.pending_tokens if self.config.prefill_s_per_token else 0,
            kv_blocks_total=self.config.blocks,
            kv_blocks_cached=len(self.cached),
            prefill_tokens_per_s=1 / self.config.prefill_s_per_token if self.config.prefill_s_per_token else 0,
            decode_step_ms=self.config.step_s * 1000,
            steps=self.steps,
            work_pending=self.running + self.waiting > 0,
            model=self.info(),
            max_num_seqs=self.config.max_num_seqs,
            max_waiting=self.config.max_waiting,
        )

    async def WatchLoad(
        self, request: epb.WatchLoadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[epb.WatchLoadResponse]:
        sequence = 0
        while not self._dead.is_set():
            sequence += 1
            yield self.report(sequence)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dead.wait(), (request.interval_ms or 250) / 1000)

    async def SubscribeKvEvents(
        self, request: epb.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[epb.SubscribeKvEventsResponse]:
        if not self.config.kv_events:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no events")
        self.subscriptions.append((request.epoch, request.last_number))
        queue: asyncio.Queue[epb.SubscribeKvEventsResponse] = asyncio.Queue()
        if request.epoch == self.epoch and request.last_number <= len(self.events):
            missed = self.events[request.last_number :]
            if missed:
                queue.put_nowait(
                    epb.SubscribeKvEventsResponse(epoch=self.epoch, number=len(self.events), events=missed)
                )
        else:
            snapshot = epb.KvSnapshot(
                scheme=SCHEME,
                block_size=self.config.block_size,
                model_digest="model-1",
                hashes=b"".join(self.cached),
                complete=True,
            )
            queue.put_nowait(
                epb.SubscribeKvEventsResponse(epoch=self.epoch, number=len(self.events), snapshot=snapshot)
            )
        self.subscribers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self.subscribers.discard(queue)

    async def Drain(self, request: epb.DrainRequest, context: grpc.aio.ServicerContext) -> epb.DrainResponse:
        if request.cancel:
            self.state = epb.ENGINE_STATE_READY
            self.draining.clear()
        else:
            self.state = epb.ENGINE_STATE_DRAINING
            asyncio.get_running_loop().call_later(request.grace_ms / 1000, self.draining.set)
        return epb.DrainResponse(remaining=self.running + self.waiting, state=self.state)

    async def ResetPrefixCache(
        self, request: epb.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> epb.ResetPrefixCacheResponse:
        count = len(self.cached)
        self.cached.clear()
        self._publish([epb.KvEvent(cleared=epb.KvCleared())])
        return epb.ResetPrefixCacheResponse(removed_blocks=count)


def _score(token: int) -> pb.TokenLogprob:
    return pb.TokenLogprob(id=token, logprob=-token / VOCAB, rank=1, top_ids=[token], top_logprobs=[-token / VOCAB])


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--prefill-s-per-token", type=float, default=0.0)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-waiting", type=int, default=8)
    config = MockConfig(**{key: value for key, value in vars(parser.parse_args()).items() if key != "listen"})
    engine = await MockEngine(parser.parse_args().listen, config).start()
    print(engine.address, time.time(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
    sys.exit(0)
