"""A real engine server with drafts: nothing that a client sees may depend on them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine_service.speculation.client import DraftClient
from engine_service.speculation.controller import DraftSpeculation, SpeculationOptions
from tandem.draft.v1 import draft_pb2 as pb
from tandem.inference.v1 import inference_pb2 as inference
from tandem.lm.types import SamplingParams
from tests.draft_service.test_service import start_process
from tests.engine_service.fakes import EOT, FakeRunner
from tests.engine_service.server import Answer, ask, serve, until
from tests.engine_service.speculation.fakes import DraftServer, ScriptedDraft, answer_with

PHRASE = "the quick brown fox jumps over the lazy dog. "


def phrases(prefix: list[int], params: SamplingParams, choice: int) -> int:
    """Says a phrase again and again, with a letter changed now and then by seed and choice."""
    position = len(prefix)
    seed = 0 if params.greedy else params.seed + 31 * choice
    if position % 17 == (seed + position // 45) % 17:
        return 97 + (seed + position * position) % 26
    return ord(PHRASE[position % len(PHRASE)])


# A step of a small real model: with steps that cost nothing the control of drafts rightly asks for none.
REAL_STEP_S = 0.004


def fake(step_seconds: float = 0.0) -> FakeRunner:
    runner = FakeRunner(num_blocks=400, max_model_len=1024, next_token=phrases)
    runner.step_seconds = step_seconds
    return runner


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="td") as name:
        yield Path(name) / "d.sock"


def controller(path: Path) -> DraftSpeculation:
    client = DraftClient(f"unix:{path}", stall_s=0.2, max_backoff_s=0.2)
    return DraftSpeculation(client, SpeculationOptions(timeout_ms=200.0, vocab_size=258))


REQUESTS = {
    "greedy": ask(PHRASE, stop=inference.StopConditions(max_tokens=200)),
    "sampled": ask(
        PHRASE,
        sampling=inference.SamplingParams(temperature=1.0, seed=5),
        stop=inference.StopConditions(max_tokens=200),
    ),
    "two choices": ask(
        PHRASE,
        n=2,
        sampling=inference.SamplingParams(temperature=0.7, seed=9),
        stop=inference.StopConditions(max_tokens=120),
    ),
    "stop string": ask(PHRASE * 2, stop=inference.StopConditions(max_tokens=300, stop=["lazy dog. the quick"])),
    "one token": ask(PHRASE, stop=inference.StopConditions(max_tokens=1)),
}


def seen(answer: Answer) -> list[object]:
    """All that a client gets, but not how it was cut into deltas."""
    answer.check()
    choices = sorted({e.finished.choice for e in answer.events if e.HasField("finished")})
    rows: list[object] = [
        (answer.ids(c), answer.text(c), answer.finished(c).SerializeToString(deterministic=True)) for c in choices
    ]
    return [*rows, answer.usage.completion_tokens, answer.usage.prompt_tokens]


async def run_all(speculation: DraftSpeculation | None, step_seconds: float = 0.0) -> dict[str, list[object]]:
    async with serve(fake(step_seconds), speculation) as server:
        results = {name: seen(await server.generate(request)) for name, request in REQUESTS.items()}
        together = await asyncio.gather(*(server.generate(request) for request in REQUESTS.values()))
        for name, answer in zip(REQUESTS, together, strict=True):
            assert seen(answer) == results[name], f"{name} differs in a batch"
        await server.idle()
        return results


async def test_the_real_draft_process_changes_nothing_and_is_used(path: Path) -> None:
    process = start_process(f"unix:{path}")
    try:
        speculation = controller(path)
        await until(lambda: speculation._client.connected)
        with_drafts = await run_all(speculation, REAL_STEP_S)
        assert speculation.stats.accepted > 50
        assert speculation.stats.errors == 0
        measured = speculation.control.cost
        assert measured.age(1) < 500 and any(measured.age(rows) < 500 for rows in range(2, 16)), "no cost was learnt"
        assert set(speculation.stats.proposers) <= {"ngram", "suffix"}
    finally:
        process.kill()
        process.wait()
    assert with_drafts == await run_all(None)


async def test_killed_in_mid_stream_and_restarted(path: Path) -> None:
    request = ask(PHRASE, stop=inference.StopConditions(max_tokens=800))
    async with serve(fake()) as server:
        expected = seen(await server.generate(request))
    process = start_process(f"unix:{path}")
    try:
        speculation = controller(path)
        await until(lambda: speculation._client.connected)
        async with serve(fake(REAL_STEP_S), speculation) as server:
            answer = Answer()
            async for response in server.call(request):
                answer.events.extend(response.events)
                count = sum(len(delta.ids) for delta in answer.deltas())
                if count > 100 and process.returncode is None and speculation.stats.accepted:
                    process.kill()
                    process.wait()
            assert process.returncode is not None, "the kill came too late"
            assert seen(answer) == expected
            before = speculation.stats.accepted
            process = start_process(f"unix:{path}")
            await until(lambda: speculation._client.connected)
            assert seen(await server.generate(request)) == expected
            assert speculation.stats.accepted > before
            assert speculation.stats.client.connects == 2
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["right", "wrong", "far too long", "stop ids", "beyond the vocabulary"])
async def test_adversarial_drafts(path: Path, kind: str) -> None:
    greedy = SamplingParams(temperature=0.0)

    def guess(tokens: list[int], want: int) -> list[int]:
        ids = list(tokens)
        for _ in range(want):
            ids.append(phrases(ids, greedy, 0))
        ids = ids[len(tokens) :]
        if kind == "wrong":
            return [(token + 1) % 256 for token in ids]
        if kind == "far too long":
            return ids * 3
        if kind == "stop ids":
            return [EOT] * want
        return [100_000] * want if kind == "beyond the vocabulary" else ids

    draft = DraftServer(path, ScriptedDraft(answer_with(guess)))
    try:
        speculation = controller(path)
        await until(lambda: speculation._client.connected)
        step_seconds = REAL_STEP_S if kind == "right" else 0.0
        assert await run_all(speculation, step_seconds) == await run_all(None)
        assert (speculation.stats.accepted > 100) == (kind == "right")
    finally:
        draft.stop()


async def test_a_draft_that_never_answers_costs_no_request(path: Path) -> None:
    def silent(question: pb.ProposeRequest, tokens: dict[int, list[int]]) -> Iterator[pb.ProposeResponse]:
        return iter(())

    draft = DraftServer(path, ScriptedDraft(silent))
    try:
        speculation = controller(path)
        await until(lambda: speculation._client.connected)
        assert await run_all(speculation) == await run_all(None)
    finally:
        draft.stop()


def test_controller_and_client_import_no_torch() -> None:
    code = "import sys, engine_service.speculation.controller; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
