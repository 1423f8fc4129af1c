"""What speculation brings: the same requests with and without drafts, in turns, on the real model.

Engine processes with equal settings run side by side, one per arm: without drafts, with a draft service, with a head,
with both. Only one works at a time, and each request goes to all of them, each time in another order. Outputs must be
equal token by token: that is checked here too. Decode speed is (tokens - 1) / decode time of the engine's own receipt.

    python -m benchmarks.spec --prompts 12 --pairs 10
    python -m benchmarks.spec --part chat --arms off head both     # a part that fits into three minutes
    python -m benchmarks.spec --part rows                          # what verifying M rows costs
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
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
    engines: dict[str, Engine], prompts: list[list[int]], tokens: int, temperature: float, shared: bool = False
) -> dict[str, object]:
    """Batch 1: each prompt on all engines, in turns. "off" is what the others are compared with."""
    rounds: list[dict[str, Answer]] = []
    arms = list(engines)
    for index, prompt in enumerate(prompts):
        turn = index % len(arms)
        # A salt of its own for each answer of each arm: the arms share one draft service, and one that has seen this
        # very answer before would flatter.
        answers = {
            arm: await engines[arm].run(prompt, tokens, temperature, index, "" if shared else secrets.token_hex(4))
            for arm in arms[turn:] + arms[:turn]
        }
        for arm, answer in answers.items():
            if answer.ids != answers["off"].ids:
                raise SystemExit(f"outputs differ between off and {arm}")
        rounds.append(answers)
    kept = [answers for answers in rounds if _counts(answers["off"].ids)]
    result: dict[str, object] = {
        "answers": len(rounds),
        "looping_or_short": len(rounds) - len(kept),
        "mean_share_in_repeated_8grams": mean([repeated_share(answers["off"].ids) for answers in rounds]),
        "tok_s_off": median([answers["off"].speed for answers in kept]),
    }
    for arm in arms:
        if arm != "off":
            result[arm] = _compared(arm, kept)
    return result


def _counts(ids: list[int]) -> bool:
    """Neither looping nor too short to be timed."""
    return repeated_share(ids) <= LOOPING and len(ids) >= 16


def _compared(arm: str, rounds: list[dict[str, Answer]]) -> dict[str, object]:
    """One arm against "off" over answers that count."""
    found = [answers[arm] for answers in rounds]
    ratios = [answers[arm].speed / answers["off"].speed for answers in rounds]
    low, high = interval(ratios)
    return {
        "tok_s": median([answer.speed for answer in found]),
        "median_ratio": median(ratios),
        "median_ci95": [low, high],
        "acceptance_length": mean([len(answer.ids) / max(1, answer.steps) for answer in found]),
        "accepted_of_proposed": mean([sum(a.accepted for a in found) / max(1, sum(a.proposed for a in found))]),
        "accepted_by_proposer": {
            name: sum(answer.by_proposer.get(name, 0) for answer in found)
            for name in sorted({name for answer in found for name in answer.by_proposer})
        },
    }


def interval(values: list[float], samples: int = 2_000) -> tuple[float, float]:
    """95% interval of the median, by bootstrap over answers."""
    if len(values) < 3:
        return float("nan"), float("nan")
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(samples))
    return round(medians[samples // 40], 3), round(medians[-samples // 40], 3)


async def loaded(
    engines: dict[str, Engine], arm: str, prompts: list[list[int]], tokens: int, pairs: int
) -> dict[str, object]:
    """All prompts at once: throughput of an arm over "off", pair by pair, with a 95% interval of the mean."""

    async def once(engine: Engine, turn: int) -> tuple[float, int]:
        began = time.perf_counter()
        answers = await asyncio.gather(
            *(engine.run(prompt, tokens, 0.8, seed=1000 * turn + i) for i, prompt in enumerate(prompts))
        )
        spent = time.perf_counter() - began
        return sum(len(answer.ids) for answer in answers) / spent, sum(answer.proposed for answer in answers)

    ratios, drafts, plain = [], 0, []
    for turn in range(pairs):
        speeds = {}
        for name in (arm, "off") if turn % 2 else ("off", arm):
            speeds[name], proposed = await once(engines[name], turn)
            drafts += proposed
        ratios.append(speeds[arm] / speeds["off"])
        plain.append(speeds["off"])
    spread = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return {
        "arm": arm,
        "concurrency": len(prompts),
        "pairs": pairs,
        "tok_s_off": median(plain),
        "mean_ratio": mean(ratios),
        "ci95": [round(mean(ratios) - spread, 4), round(mean(ratios) + spread, 4)],
        "drafts_proposed": drafts,
    }


def counters(port: int) -> dict[str, float]:
    """The engine's own counters of speculation, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("tandem_speculation_") and "_created" not in line:
            name, _, value = line.rpartition(" ")
            found[name.removeprefix("tandem_speculation_")] = float(value)
    return found


def by_position(found: dict[str, float]) -> dict[str, list[float]]:
    """Per proposer, the share of verified drafts that were right at each position, given that they were verified."""
    shares: dict[str, list[float]] = {}
    for name, value in found.items():
        if name.startswith("proposed_tokens_total") and value:
            accepted = found.get(name.replace("proposed", "accepted"), 0.0)
            shares.setdefault(name.split('proposer="')[1].split('"')[0], []).append(round(accepted / value, 3))
    return shares


def rows(model: str, turns: int, head: str) -> dict[str, object]:
    """Milliseconds of a decode step by rows, and of one drafted token of the head."""
    from engine_service.speculation.head import load
    from tandem.lm.proposers.head import HeadRun
    from tandem.lm.runner import load_runner
    from tandem.lm.runner_settings import RunnerSettings
    from tandem.lm.types import SamplingParams, Sequence, Slice
    from tandem.models.store import resolve

    runner = load_runner(RunnerSettings(resolve(model).path, kv_cache_bytes=64 << 20, max_num_batched_tokens=256))
    prompt = list(range(1000, 1200))
    sequence = Sequence(1, 0, SamplingParams(temperature=0.0), list(prompt), len(prompt))
    table = list(range(20))
    first = runner.execute([Slice(sequence, table, 0, len(prompt), hidden=runner.spec.gives_hidden)])[0]
    sequence.token_ids.append(first.token_ids[0])
    took: dict[int, list[float]] = {count: [] for count in (1, 2, 3, 4, 5, 6, 8)}
    proposer, drafting = load(head, runner), []
    for _ in range(turns):
        for count, times in took.items():
            piece = Slice(sequence, table, len(prompt), 1, tuple(range(2000, 2000 + count - 1)))
            began = time.perf_counter()
            runner.execute([piece])
            times.append((time.perf_counter() - began) * 1e3)
        if proposer is not None and first.hidden is not None:
            began = time.perf_counter()
            proposer.draft([HeadRun(sequence, first.hidden[0], 3)])
            drafting.append((time.perf_counter() - began) * 1e3 / 3)
    return {
        "kernel_path": runner.spec.kernel_path,
        "ms_by_rows": {count: median(times) for count, times in took.items()},
        "head_ms_per_token": median(drafting),
    }


def mean(values: list[float]) -> float:
    return round(statistics.fmean(values), 4) if values else float("nan")


def median(values: list[float]) -> float:
    return round(statistics.median(values), 4) if values else float("nan")


@contextlib.contextmanager
def processes(arguments: argparse.Namespace) -> Iterator[dict[str, tuple[str, int]]]:
    """Starts the draft and one engine per arm: (address, port of its metrics) by arm."""
    with tempfile.TemporaryDirectory(prefix="ts") as name, contextlib.ExitStack() as stack:
        run = Path(name)
        tandem = [sys.executable, "-m", "tandem.cli"]
        engine = [*tandem, "engine", "--model", arguments.model, *arguments.engine_args.split()]
        with_draft, with_head = ["--draft", f"unix:{run}/d.sock"], ["--head", arguments.head]
        flags = {
            "off": ["--head", "none"],
            "copy": [*with_draft, "--head", "none"],
            "head": with_head,
            "both": [*with_draft, *with_head],
        }
        commands = [[*tandem, "draft", "--listen", f"unix:{run}/d.sock", *arguments.draft_args.split()]]
        found = {}
        for arm in arguments.arms:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            found[arm] = f"unix:{run}/{arm}.sock", port
            commands.append([*engine, "--listen", found[arm][0], "--metrics-listen", f"127.0.0.1:{port}", *flags[arm]])
        for number, command in enumerate(commands):
            log = stack.enter_context((run / f"{number}.log").open("w"))
            process = subprocess.Popen(command, stderr=log)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
        yield found


PARTS = {
    "chat": (("chat_t0", CHAT, 0.0), ("chat_t0.8", CHAT, 0.8)),
    "copy": (("copy_t0", COPY, 0.0), ("copy_t0.8", COPY, 0.8)),
}


async def measure(arguments: argparse.Namespace, arms: dict[str, tuple[str, int]]) -> dict[str, object]:
    engines = {arm: Engine(address) for arm, (address, _) in arms.items()}
    bundles = [await engine.ready() for engine in engines.values()]
    tokenizer = Tokenizer(bundles[0])
    for engine in engines.values():
        for text in CHAT[-2:]:
            # Warm, and the control of drafts knows the cost of steps.
            await engine.run(chat_ids(tokenizer, text), arguments.warm, 0.0, 0)
    result: dict[str, object] = {}
    for part, kinds in PARTS.items():
        for name, texts, temperature in kinds:
            if part in arguments.part and (not arguments.only or name in arguments.only):
                prompts = [chat_ids(tokenizer, text) for text in texts[: arguments.prompts]]
                result[name] = await single(engines, prompts, arguments.tokens, temperature, arguments.shared)
                print(name, json.dumps(result[name]), flush=True)
    if "load" in arguments.part and arguments.pairs:
        many = [chat_ids(tokenizer, text) for text in (CHAT * 32)[: arguments.concurrency]]
        arm = arguments.arms[-1]
        before = counters(arms[arm][1])
        loading = await loaded(engines, arm, many, arguments.loaded_tokens, arguments.pairs)
        after = counters(arms[arm][1])
        loading["head_tokens"] = sum(after[n] - before.get(n, 0.0) for n in after if n.startswith("head_tokens"))
        loading["questions"] = sum(after[n] - before.get(n, 0.0) for n in after if n.startswith("questions"))
        result["loaded"] = loading
        print("loaded", json.dumps(loading), flush=True)
    for arm, (_, port) in arms.items():
        found = counters(port)
        if found:
            shown = {
                n.split("{")[0].removesuffix("_total"): round(v, 3) for n, v in found.items() if "position" not in n
            }
            result[f"counters_{arm}"] = {"right_by_position": by_position(found), **shown}
            print(f"counters_{arm}", json.dumps(result[f"counters_{arm}"]), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--part", nargs="*", choices=["chat", "copy", "load", "rows"], default=["chat", "copy", "load"])
    parser.add_argument("--arms", nargs="*", choices=["off", "copy", "head", "both"], default=["off", "copy", "both"])
    parser.add_argument("--head", default="auto", help="head of the arms that have one: auto or a file")
    parser.add_argument("--engine-args", default="", help="further flags of all engines")
    parser.add_argument("--draft-args", default="", help="further flags of the draft")
    parser.add_argument("--prompts", type=int, default=12, help="prompts per kind")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens per answer")
    parser.add_argument("--warm", type=int, default=64, help="tokens of the two answers that warm each engine")
    parser.add_argument("--only", nargs="*", help="kinds of the parts to run, such as chat_t0.8")
    parser.add_argument("--shared", action="store_true", help="one salt for all: the draft learns from every answer")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--loaded-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=0, help="interleaved pairs at full concurrency; 0: none")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    if "off" not in arguments.arms:
        parser.error("--arms needs off, with which the others are compared")
    result: dict[str, object] = {}
    if "rows" in arguments.part:
        result["rows"] = rows(arguments.model, arguments.prompts * 5, arguments.head)
        print("rows", json.dumps(result["rows"]), flush=True)
    if set(arguments.part) - {"rows"}:
        with processes(arguments) as arms:
            result |= asyncio.run(measure(arguments, arms))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
