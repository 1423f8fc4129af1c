"""A real gRPC InferenceService with a toy model: it goes on with the prompt's own tokens, in turn.

Sampling options, stop conditions, logprobs, grammars (llguidance) and n are honoured, so that the gateway's promises
can be checked without weights. A request id that begins with "fault:" makes it misbehave; see `_fault`.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import llguidance
import numpy as np

from tandem import rpc
from tandem.errors import TandemError, abort
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc as pb_grpc
from tandem.models.store import resolve
from tandem.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerBundle, load_bundle

MODEL = "smollm2-135m-instruct"
MAX_MODEL_LEN = 2048
VOCAB = 49152
NUMERICS = "mock-numerics"


@functools.cache
def bundle() -> TokenizerBundle:
    return load_bundle(resolve(MODEL).path)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(bundle())


@functools.cache
def ll_tokenizer() -> Any:
    return llguidance.LLTokenizer(bundle().tokenizer_json.decode(), eos_token=2)


def grammar_of(structured: pb.StructuredOutput) -> str | None:
    kind = structured.WhichOneof("kind")
    if kind is None:
        return None
    if kind == "json_object":
        return llguidance.LLMatcher.grammar_from_json_schema({"type": "object"})
    if kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(
            structured.json_schema, defaults={"whitespace_flexible": False}
        )
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(structured.regex)
    if kind == "choice":
        options = " | ".join(llguidance_string(option) for option in structured.choice.options)
        return llguidance.LLMatcher.grammar_from_lark(f"start: {options}")
    if kind == "grammar":
        return llguidance.LLMatcher.grammar_from_lark(structured.grammar)
    raise TandemError("UNSUPPORTED", f"structured.{kind} is not implemented", field=f"structured.{kind}")


def llguidance_string(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False)


class ToyChoice:
    """One choice: the toy model, its sampler, its stop conditions."""

    def __init__(self, request: pb.GenerateRequest, index: int, seed: int) -> None:
        self.request, self.index, self.seed = request, index, seed
        self.prompt = list(request.token_ids.ids)
        self.echoed = [token for token in self.prompt if token not in tokenizer().special_token_ids] or [30]
        self.ids: list[int] = []
        self.detokenizer = IncrementalDetokenizer(tokenizer(), not request.output.keep_special_tokens)
        self.text = ""
        self.sent = 0
        self.finished: pb.Finished | None = None
        grammar = grammar_of(request.structured)
        self.matcher = None
        if grammar is not None:
            self.matcher = llguidance.LLMatcher(ll_tokenizer(), grammar)
            if self.matcher.is_error():
                raise TandemError("GRAMMAR", f"grammar: {self.matcher.get_error()}"[:300], field="structured")
        model_stops = () if request.stop.ignore_eos else bundle().stop_token_ids
        self.stops = frozenset(model_stops) | frozenset(request.stop.stop_token_ids)
        for old in request.resume.choices:
            if old.index == index:
                self._replay(old)
        self.limit = request.stop.max_tokens if request.stop.HasField("max_tokens") else 16

    def _replay(self, old: pb.ResumeChoice) -> None:
        """Reads what an earlier stream had sent."""
        self.ids = list(old.emitted_ids)
        self.text = self.detokenizer.push(self.ids)
        self.sent = len(self.text.encode()[: old.text_bytes_sent].decode())
        if old.finished:
            self.finished = pb.Finished(choice=self.index, reason=pb.FINISH_REASON_STOP)

    def logits(self) -> np.ndarray:
        position = len(self.ids)
        last = (self.prompt + self.ids)[-1]
        rng = np.random.default_rng(last * 7919 + position)
        logits = rng.standard_normal(VOCAB).astype(np.float64) * 2
        logits[list(bundle().stop_token_ids)] -= 12
        logits[self.echoed[position % len(self.echoed)]] += 14
        return logits

    def step(self) -> tuple[int, pb.TokenLogprob]:
        """Samples one token."""
        params = self.request.sampling
        raw = self.logits()
        logits = raw.copy()
        if self.matcher is not None:
            logits[~self._mask()] = -np.inf
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        if params.allowed_token_ids:
            allowed = np.full(VOCAB, -np.inf)
            allowed[list(params.allowed_token_ids)] = 0
            logits += allowed
        if len(self.ids) < self.request.stop.min_tokens:
            held = list(self.stops | frozenset(bundle().stop_token_ids))
            logits[held] = -np.inf
        for token in set(self.ids):
            logits[token] -= params.frequency_penalty * self.ids.count(token)
        token = self._sample(logits)
        if self.matcher is not None and not self.matcher.is_stopped():
            self.matcher.consume_token(token)
        self.ids.append(token)
        return token, score(raw, token, self.request.output.logprobs)

    def _mask(self) -> np.ndarray:
        if self.matcher.is_stopped():  # type: ignore[union-attr]
            mask = np.zeros(VOCAB, dtype=bool)
            mask[2] = True
            return mask
        raw = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)  # type: ignore[union-attr]
        return np.unpackbits(raw, bitorder="little")[:VOCAB].astype(bool)

    def _sample(self, logits: np.ndarray) -> int:
        params = self.request.sampling
        temperature = params.temperature if params.HasField("temperature") else 1.0
        if temperature == 0 or params.top_k == 1 or params.min_p == 1.0 or (0 < params.top_p < 1e-3):
            return int(np.argmax(logits))
        rng = np.random.default_rng([self.seed, len(self.ids), self.index])
        return int(np.argmax(logits / temperature + rng.gumbel(size=VOCAB)))

    def advance(self) -> pb.Delta:
        """One token as a delta; sets `finished` at the end."""
        offset = len(self.ids)
        token, entry = self.step()
        delta = pb.Delta(choice=self.index, token_offset=offset, ids=[token])
        if self.request.output.HasField("logprobs"):
            delta.logprobs.append(entry)
        stop = self.request.stop
        if token in self.stops:
            self.finished = pb.Finished(choice=self.index, reason=pb.FINISH_REASON_STOP, stop_token_id=token)
            self.text += self.detokenizer.flush()
        else:
            self.text += self.detokenizer.push([token])
            if len(self.ids) >= self.limit:
                self.text += self.detokenizer.flush()
                self.finished = pb.Finished(choice=self.index, reason=pb.FINISH_REASON_LENGTH)
        found = [(self.text.find(s), s) for s in stop.stop if s in self.text]
        if found:
            at, text = min(found)
            self.text = self.text[: at + (len(text) if stop.include_stop_str_in_output else 0)]
            self.finished = pb.Finished(choice=self.index, reason=pb.FINISH_REASON_STOP, stop_string=text)
        held = 0 if self.finished else self._held(list(stop.stop))
        delta.text_offset = len(self.text[: self.sent].encode())
        delta.text = self.text[self.sent : len(self.text) - held]
        self.sent += len(delta.text)
        return delta

    def _held(self, stops: list[str]) -> int:
        best = 0
        for stop in stops:
            for length in range(min(len(stop) - 1, len(self.text)), best, -1):
                if stop.startswith(self.text[-length:]):
                    best = length
                    break
        return best


def score(raw: np.ndarray, token: int, top: int) -> pb.TokenLogprob:
    logprobs = raw - (np.log(np.exp(raw - raw.max()).sum()) + raw.max())
    entry = pb.TokenLogprob(id=token, logprob=float(logprobs[token]), rank=int((logprobs > logprobs[token]).sum()) + 1)
    if top:
        best = np.argpartition(-logprobs, top)[:top]
        best = best[np.argsort(-logprobs[best])]
        entry.top_ids.extend(int(i) for i in best)
        entry.top_logprobs.extend(float(logprobs[i]) for i in best)
    return entry


class MockRouter(pb_grpc.InferenceServiceServicer):
    """The service. `served` False plays a fleet without engines."""

    def __init__(self) -> None:
        self.served = True
        # Says nothing about its models, as if no packet came back.
        self.silent = False
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled: list[str] = []
        self.running = 0
        self.token_delay = 0.0
        self.most_tokens = MAX_MODEL_LEN
        self.embeds: list[pb.EmbedRequest] = []

    def info(self) -> pb.ModelInfo:
        return pb.ModelInfo(
            name=MODEL,
            aliases=["alias/model"],
            model_digest="d",
            tokenizer_digest=bundle().digest,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
            numerics_id=NUMERICS,
            batch_invariant=True,
            created_unix_s=1_700_000_000,
            hidden_size=8,
            max_n=16,
            max_logprobs=20,
        )

    async def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        if self.silent:
            await asyncio.sleep(3600)
        return pb.ListModelsResponse(models=[self.info()] if self.served else [])

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        if request.model in ("", MODEL, "alias/model"):
            if self.served:
                return pb.GetModelInfoResponse(model=self.info())
            await abort(context, TandemError("NO_ENGINE", "no engine serves this model now", retry_after_s=2.5))
        await abort(
            context, TandemError("MODEL_NOT_FOUND", f"unknown model {request.model}", model=request.model, served=MODEL)
        )

    async def GetTokenizer(self, request: Any, context: Any) -> pb.GetTokenizerResponse:
        return bundle().to_proto()

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        self.embeds.append(request)
        result = pb.EmbedResponse(prompt_tokens=sum(len(item.ids) for item in request.inputs))
        for item in request.inputs:
            raw = hashlib.sha256(bytes(str(list(item.ids)), "ascii")).digest()[:8]
            values = np.frombuffer(raw, dtype=np.uint8).astype(np.float32) + 1
            result.embeddings.append(pb.Embedding(values=values / np.linalg.norm(values)))
        return result

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.running += 1
        try:
            async for message in self._generate(request, context):
                yield message
        except TandemError as error:
            await abort(context, error)
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running -= 1

    async def _generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        fault = request.request_id.removeprefix("fault:") if request.request_id.startswith("fault:") else ""
        kind, _, argument = fault.partition(",")[0].partition("=")
        if kind == "lost" and sum(old.request_id == request.request_id for old in self.requests) <= int(argument):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "keepalive watchdog timeout at 10.0.0.7")
        await _fault_before(kind, argument, context)
        prompt = list(request.token_ids.ids)
        choices = [ToyChoice(request, index, request.sampling.seed) for index in range(request.n or 1)]
        for choice in choices:
            choice.limit = min(choice.limit, self.most_tokens)
        yield _one(
            accepted=pb.Accepted(
                seed=request.sampling.seed,
                prompt_tokens=len(prompt),
                cached_tokens=4,
                numerics_id=NUMERICS,
                epoch=1,
                model=MODEL,
                engine="mock:1",
                batch_invariant=True,
            )
        )
        if kind == "hang":
            await asyncio.sleep(float(argument or 60))
        if request.output.HasField("prompt_logprobs"):
            yield _one(prompt=pb.PromptScores(tokens=_prompt_scores(prompt, request.output.prompt_logprobs)))
        held: dict[int, pb.Delta] = {}
        produced = 0
        for choice in choices:
            if choice.limit == 0:
                choice.finished = pb.Finished(choice=choice.index, reason=pb.FINISH_REASON_LENGTH)
                yield _one(finished=choice.finished)
        while any(choice.finished is None for choice in choices):
            await asyncio.sleep(self.token_delay)
            for choice in choices:
                if choice.finished is not None:
                    continue
                delta = choice.advance()
                produced += 1
                if request.output.final_only:
                    _merge(held, delta)
                else:
                    yield _one(delta=delta)
                if choice.finished is not None:
                    if choice.index in held:
                        yield _one(delta=held[choice.index])
                    yield _one(finished=choice.finished)
            if kind == "die" and produced >= int(argument):
                raise TandemError("ENGINE_CRASH", "two engines died while this request ran")
            if kind == "drop" and produced >= int(argument) and request.attempt <= 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "socket closed at 10.0.0.7")
            if kind == "drops" and produced >= int(argument):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "socket closed at 10.0.0.7")
        completion = sum(len(choice.ids) for choice in choices)
        usage = pb.Usage(prompt_tokens=len(prompt), completion_tokens=completion, cached_tokens=4)
        if request.output.receipt:
            usage.receipt.steps = produced
            usage.receipt.numerics_id = NUMERICS
        yield _one(usage=usage)


def _one(**event: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(events=[pb.GenerateEvent(**event)])


def _merge(held: dict[int, pb.Delta], delta: pb.Delta) -> None:
    if delta.choice not in held:
        held[delta.choice] = delta
        return
    whole = held[delta.choice]
    whole.ids.extend(delta.ids)
    whole.logprobs.extend(delta.logprobs)
    whole.text += delta.text


def _prompt_scores(prompt: list[int], top: int) -> list[pb.TokenLogprob]:
    result = [pb.TokenLogprob(id=prompt[0])]
    for position in range(1, len(prompt)):
        rng = np.random.default_rng(prompt[position - 1] * 31 + position)
        result.append(score(rng.standard_normal(VOCAB) * 2, prompt[position], top))
    return result


async def _fault_before(kind: str, argument: str, context: Any) -> None:
    """Faults before *accepted*: refuse=REASON, late=REASON, slow=SECONDS, unavailable, big."""
    if kind == "refuse":
        raise TandemError(argument, "refused on command", field="sampling.temperature", retry_after_s=7)
    if kind == "late":
        await asyncio.sleep(1.5)
        raise TandemError(argument, "refused late on command")
    if kind == "slow":
        await asyncio.sleep(float(argument))
    if kind == "unavailable":
        await context.abort(grpc.StatusCode.UNAVAILABLE, "failed to connect to unix:/secret/path")
    if kind == "big":
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)")


async def start(address: str = "127.0.0.1:0") -> tuple[grpc.aio.Server, MockRouter, int]:
    """A running server, its servicer and its port."""
    server, health = rpc.server()
    servicer = MockRouter()
    pb_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    await server.start()
    await health.set(True)
    return server, servicer, port
