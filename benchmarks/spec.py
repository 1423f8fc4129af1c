"""What speculation brings: the same requests with and without drafts, in turns, on the real model.

Two engine processes with equal settings run side by side, one with a draft service; only one works at a time, and each
request goes to both, first to one, then first to the other. Outputs must be equal token by token: that is checked here
too. Decode speed is (tokens - 1) / decode time of the engine's own receipt.

    python -m benchmarks.spec --prompts 12 --pairs 10
    python -m benchmarks.spec --on unix:/run/a.sock --off unix:/run/b.sock     # engines that run already
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from benchmarks.spec_prompts import CHAT, COPY
from tandem import rpc
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.tokenizer import Tokenizer, TokenizerBundle

# An answer with a larger share of its tokens inside 8-grams that it already wrote is looping.
LOOPING = 0.3


@dataclass(slots=True)
class Answer:
    """One finished request."""

    ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    wall_s: float = 0.0
    decode_ms: float = 0.0
    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    by_proposer: dict[str, int] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Decoded tokens per second."""
        return (len(self.ids) - 1) / self.decode_ms * 1000 if self.decode_ms else 0.0


def repeated_share(ids: list[int], size: int = 8) -> float:
    """Share of the tokens that lie inside an n-gram of the output which occurred in it before."""
    seen: set[tuple[int, ...]] = set()
    inside = [False] * len(ids)
    for start in range(len(ids) - size + 1):
        gram = tuple(ids[start : start + size])
        if gram in seen:
            inside[start : start + size] = [True] * size
        seen.add(gram)
    return sum(inside) / len(ids) if ids else 0.0


class Engine:
    """A client of one engine."""

    def __init__(self, address: str) -> None:
        self.channel = rpc.channel(address)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.model = ""

    async def ready(self, timeout_s: float = 180.0) -> TokenizerBundle:
        """Waits until the engine serves a model; returns its tokenizer."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                models = await self.stub.ListModels(pb.ListModelsRequest())
                if models.models:
                    self.model = models.models[0].name
                    answer = await self.stub.GetTokenizer(pb.GetTokenizerRequest(model=self.model))
                    return TokenizerBundle.from_proto(answer)
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.25)

    async def run(self, prompt: list[int], tokens: int, temperature: float, seed: int, salt: str = "") -> Answer:
        """salt: requests of different salts learn nothing from each other."""
        request = pb.GenerateRequest(
            model=self.model,
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(temperature=temperature, seed=seed),
            stop=pb.StopConditions(max_tokens=tokens),
            output=pb.OutputOptions(receipt=True),
            cache_salt=salt,
        )
        answer, began = Answer(), time.perf_counter()
        async for response in self.stub.Generate(request):
            for event in response.events:
                kind = event.WhichOneof("event")
                if kind == "delta":
                    answer.ttft_s = answer.ttft_s or time.perf_counter() - began
                    answer.ids.extend(event.delta.ids)
                elif kind == "usage":
                    receipt = event.usage.receipt
                    answer.decode_ms, answer.steps = receipt.decode_ms, receipt.steps
                    answer.proposed, answer.accepted = receipt.drafts_proposed, receipt.drafts_accepted
                    answer.by_proposer = dict(receipt.accepted_by_proposer)
        answer.wall_s = time.perf_counter() - began
        return answer


def chat_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The prompt as the default model's chat format has it."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(turns)


async def single(
    on: Engine, off: Engine, prompts: list[list[int]], tokens: int, temperature: float, shared: bool = False
) -> dict[str, object]:
    """Batch 1: each prompt on both engines, in turns."""
    pairs: list[tuple[Answer, Answer]] = []
    for index, prompt in enumerate(prompts):
        order = (on, off) if index % 2 else (off, on)
        # A salt of its own: a draft that has seen this very answer before would flatter.
        salt = "" if shared else secrets.token_hex(4)
        answers = {engine: await engine.run(prompt, tokens, temperature, index, salt) for engine in order}
        pairs.append((answers[on], answers[off]))
    for with_drafts, without in pairs:
        if with_drafts.ids != without.ids:
            raise SystemExit("outputs differ with and without drafts")
    kept = [pair for pair in pairs if repeated_share(pair[0].ids) <= LOOPING and len(pair[0].ids) >= 16]
    return {
        "answers": len(pairs),
        "looping_or_short": len(pairs) - len(kept),
        "mean_share_in_repeated_8grams": mean([repeated_share(a.ids) for a, _ in pairs]),
        "tok_s_off": median([b.speed for _, b in kept]),
        "tok_s_on": median([a.speed for a, _ in kept]),
        "median_ratio": median([a.speed / b.speed for a, b in kept]),
        "ratios": [round(a.speed / b.speed, 3) for a, b in kept],
        "acceptance_length": mean([len(a.ids) / max(1, a.steps) for a, _ in kept]),
        "acceptance_length_looping": mean([len(a.ids) / max(1, a.steps) for a, _ in pairs if (a, _) not in kept]),
        "accepted_of_proposed": sum(a.accepted for a, _ in kept) / max(1, sum(a.proposed for a, _ in kept)),
        "accepted_by_proposer": {name: sum(a.by_proposer.get(name, 0) for a, _ in kept) for name in names(kept)},
    }


def names(pairs: list[tuple[Answer, Answer]]) -> list[str]:
    return sorted({name for answer, _ in pairs for name in answer.by_proposer})


async def loaded(on: Engine, off: Engine, prompts: list[list[int]], tokens: int, pairs: int) -> dict[str, object]:
    """All prompts at once: throughput with over without, pair by pair, with a 95% interval of the mean."""

    async def once(engine: Engine, turn: int) -> tuple[float, int]:
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(engine.run(prompt, tokens, 0.8, seed=1000 * turn + i) for i, prompt in enumerate(prompts))
        )
        spent = time.perf_counter() - began
        return sum(len(answer.ids) for answer in answers) / spent, sum(answer.proposed for answer in answers)

    ratios, drafts = [], 0
    for turn in range(pairs):
        order = (on, off) if turn % 2 else (off, on)
        speeds = {}
        for engine in order:
            speeds[engine], proposed = await once(engine, turn)
            drafts += proposed
        ratios.append(speeds[on] / speeds[off])
    spread = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return {
        "concurrency": len(prompts),
        "pairs": pairs,
        "mean_ratio": mean(ratios),
        "ci95": [round(mean(ratios) - spread, 4), round(mean(ratios) + spread, 4)],
        "drafts_proposed": drafts,
    }


def mean(values: list[float]) -> float:
    return round(statistics.fmean(values), 4) if values else float("nan")


def median(values: list[float]) -> float:
    return round(statistics.median(values), 4) if values else float("nan")


@contextlib.contextmanager
def processes(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Starts draft and both engines, or takes the addresses of running ones."""
    if arguments.on and arguments.off:
        yield arguments.on, arguments.off
        return
    with tempfile.TemporaryDirectory(prefix="ts") as name, contextlib.ExitStack() as stack:
        run = Path(name)
        tandem = [sys.executable, "-m", "tandem.cli"]
        draft = [*tandem, "draft", "--listen", f"unix:{run}/d.sock", *arguments.draft_args.split()]
        engine = [*tandem, "engine", "--model", arguments.model, *arguments.engine_args.split()]
        commands = [
            draft,
            [*engine, "--listen", f"unix:{run}/on.sock", "--draft", f"unix:{run}/d.sock"],
            [*engine, "--listen", f"unix:{run}/off.sock"],
        ]
        for number, command in enumerate(commands):
            log = stack.enter_context((run / f"{number}.log").open("w"))
            process = subprocess.Popen(command, stderr=log)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
        yield f"unix:{run}/on.sock", f"unix:{run}/off.sock"


async def measure(arguments: argparse.Namespace, on_address: str, off_address: str) -> dict[str, object]:
    on, off = Engine(on_address), Engine(off_address)
    tokenizer = Tokenizer(await on.ready())
    await off.ready()
    chat = [chat_ids(tokenizer, text) for text in CHAT]
    copy = [chat_ids(tokenizer, text) for text in COPY]
    for engine in (on, off):
        await engine.run(chat[0], 16, 0.0, 0)
    count, tokens = arguments.prompts, arguments.tokens
    result: dict[str, object] = {}
    for name, prompts, temperature in (
        ("chat_t0", chat, 0.0),
        ("chat_t0.8", chat, 0.8),
        ("copy_t0", copy, 0.0),
        ("copy_t0.8", copy, 0.8),
    ):
        if arguments.only and name not in arguments.only:
            continue
        result[name] = await single(on, off, prompts[:count], tokens, temperature, arguments.shared)
        print(name, json.dumps(result[name]), flush=True)
    if arguments.pairs:
        many = (chat * 32)[: arguments.concurrency]
        result["loaded"] = await loaded(on, off, many, arguments.loaded_tokens, arguments.pairs)
        print("loaded", json.dumps(result["loaded"]), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--on", default="", help="address of an engine with drafts")
    parser.add_argument("--off", default="", help="address of an engine without")
    parser.add_argument("--engine-args", default="", help="further flags of both engines")
    parser.add_argument("--draft-args", default="", help="further flags of the draft")
    parser.add_argument("--prompts", type=int, default=12, help="prompts per kind")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens per answer")
    parser.add_argument("--only", nargs="*", help="kinds to run")
    parser.add_argument("--shared", action="store_true", help="one salt for all: the draft learns from every answer")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--loaded-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=0, help="interleaved pairs at full concurrency; 0: none")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    with processes(arguments) as (on, off):
        result = asyncio.run(measure(arguments, on, off))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
