"""Every proposer, and drafts that err in every way, with and without a head beside them, on a real small model and over
the real server: ids, text, logprobs and ends are those of no drafts at all, whatever the request asks for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest

from draft_service.session import Session
from engine_service.speculation.client import DraftClient
from engine_service.speculation.control import AskPolicy
from engine_service.speculation.controller import DraftSpeculation, SpeculationOptions
from engine_service.speculation.head import HeadState
from tandem.draft.v1 import draft_pb2 as pb
from tandem.draft.v1 import draft_pb2_grpc as rpc
from tandem.lm.proposers import CombinedProposer, NgramProposer, Proposer, SuffixProposer
from tandem.lm.proposers.head import HeadProposer
from tandem.lm.proposers.model import ModelProposer
from tandem.lm.proposers.table import build as build_table
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.types import Runner, Sequence, Slice, SliceOutput
from tests.engine_service.fakes import BYTE_VOCAB
from tests.engine_service.server import Answer, Server, serve, until
from tests.engine_service.speculation.fakes import DraftServer, ScriptedDraft, answer_with
from tests.engine_service.speculation.test_head_matrix import REQUESTS, answers, build, seen
from tests.engine_service.test_path_matrix import BLOCK, runner  # noqa: F401
from tests.heads import EagerControl, random_head

Seen = dict[str, list[object]]
PROMPT = list(b"What is")
# Ways to err, by what a question's answer becomes.
ADVERSARIES = (
    "right",
    "wrong",
    "random",
    "late",
    "stale base",
    "stale epoch",
    "truncated",
    "dead in mid-stream",
    "restarted",
)
BREAKING = ("stale epoch", "dead in mid-stream", "restarted")


@pytest.fixture(scope="module")
def plain(runner: Runner) -> Seen:  # noqa: F811
    """What every request gets without drafts."""
    return {name: seen(answer) for name, answer in asyncio.run(answers(runner, None)).items()}


@pytest.fixture(autouse=True)
def insistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions never become rare, however little they bring."""
    monkeypatch.setattr(AskPolicy, "ripe", True)


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="td") as name:
        yield Path(name) / "d.sock"


def known_outputs(plain: Seen) -> list[list[int]]:
    return [[*PROMPT, *choice[0]] for choices in plain.values() for choice in choices]  # type: ignore[index]


class Adversary(ScriptedDraft):
    """Knows all outputs and answers with what comes, or errs in one way."""

    def __init__(self, kind: str, outputs: list[list[int]]) -> None:
        super().__init__(self._answer)
        self._kind, self._outputs = kind, outputs
        self._right = answer_with(self._rest)
        self._rng = random.Random(3)

    def _rest(self, tokens: list[int], want: int) -> list[int]:
        fitting = (ids[len(tokens) :] for ids in self._outputs if ids[: len(tokens)] == tokens)
        ids = next((rest for rest in fitting if rest), [1])[:want]
        if self._kind == "wrong":
            return [(token + 1) % BYTE_VOCAB for token in ids]
        if self._kind == "random":
            return [token if self._rng.random() < 0.6 else self._rng.randrange(BYTE_VOCAB) for token in ids]
        return ids[: self._rng.randrange(1, 3)] if self._kind == "truncated" else ids

    def _answer(self, question: pb.ProposeRequest, tokens: dict[int, list[int]]) -> Iterator[pb.ProposeResponse]:
        if self._kind == "late":
            time.sleep(0.02)
        if self._kind == "dead in mid-stream" and self.questions % 4 == 3:
            raise RuntimeError("planted")
        for response in self._right(question, tokens):
            if self._kind == "stale epoch":
                response.draft_epoch = 5 + self.questions // 4
            for proposal in response.proposals if self._kind == "stale base" else ():
                proposal.base_len -= self.questions % 2
            yield response


def speculation_of(path: Path, head: HeadProposer | None, late: bool = False) -> DraftSpeculation:
    """Asks at every step, waits for every answer (unless they are to be late), and runs whatever drafts there are."""
    options = SpeculationOptions(timeout_ms=2.0 if late else 300.0, vocab_size=BYTE_VOCAB, stall_s=0.5)
    speculation = DraftSpeculation(DraftClient(f"unix:{path}", stall_s=0.5, max_backoff_s=0.1), options, head=head)
    speculation.control = EagerControl()
    wait_s = 0.002 if late else 0.3
    speculation._wait = lambda states: speculation._absorb(wait_s) if states else None  # type: ignore[method-assign]
    if speculation.head is not None:
        source = speculation.head

        def plan(wishes: list[tuple[HeadState, Sequence, int]], batch: int, cost: object) -> list[int]:
            return [min(2, room) if source.ready(state, sequence) else 0 for state, sequence, room in wishes]

        source.plan = plan  # type: ignore[method-assign,assignment]
        # Every second sequence prefers the head's drafts to the service's.
        source.yields = lambda state, sequence, *of: 99.0 * (sequence.id % 2)  # type: ignore[method-assign,assignment]
    return speculation


@contextlib.asynccontextmanager
async def served(
    runner: Runner,  # noqa: F811
    speculation: DraftSpeculation,
    step_s: float = 0.0,
) -> AsyncIterator[Server]:
    """step_s: a step takes so much longer, so that a broken stream comes back while there is something to draft."""
    runner.gate = threading.Event()  # type: ignore[attr-defined]
    close, execute = runner.close, runner.execute

    def slowly(slices: list[Slice]) -> list[SliceOutput]:
        time.sleep(step_s)
        return execute(slices)

    runner.close, runner.execute = lambda: None, slowly  # type: ignore[method-assign]
    try:
        async with serve(runner, speculation) as server:  # type: ignore[arg-type]
            yield server
    finally:
        runner.close, runner.execute = close, execute  # type: ignore[method-assign]


async def ask_all(server: Server) -> Seen:
    """All requests, one after the other and then together."""
    alone = {name: await server.generate(build(fields)) for name, fields in REQUESTS.items()}
    together = await asyncio.gather(*(server.generate(build(fields)) for fields in REQUESTS.values()))
    for name, answer in zip(REQUESTS, together, strict=True):
        assert seen(answer) == seen(alone[name]), f"{name} differs in a batch"
    check_receipts([*alone.values(), *together])
    return {name: seen(answer) for name, answer in alone.items()}


def check_receipts(found: list[Answer]) -> None:
    """Sums by proposer and by position are the totals, and every verification commits one token beyond its drafts."""
    for answer in found:
        receipt = answer.usage.receipt
        assert sum(receipt.accepted_by_proposer.values()) == receipt.drafts_accepted <= receipt.drafts_proposed
        assert sum(receipt.proposed_by_proposer.values()) == receipt.drafts_proposed
        by_position = list(receipt.accepted_by_position)
        assert sum(by_position) == receipt.drafts_accepted and by_position == sorted(by_position, reverse=True)
        assert receipt.verifications <= receipt.drafts_proposed
        assert receipt.verifications >= max(by_position, default=0)


async def restart_now_and_then(server: DraftServer, adversary: Adversary, done: asyncio.Event) -> None:
    """After every four questions."""
    goal = 4
    while not done.is_set():
        await asyncio.sleep(0.005)
        if adversary.questions < goal:
            continue
        goal = adversary.questions + 4
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)


@pytest.mark.parametrize("with_head", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ADVERSARIES)
async def test_no_draft_changes_what_a_client_gets(
    kind: str,
    with_head: bool,
    path: Path,
    runner: Runner,  # noqa: F811
    plain: Seen,
) -> None:
    head = HeadProposer(random_head(runner.spec), runner) if with_head else None
    adversary = Adversary(kind, known_outputs(plain))
    draft = DraftServer(path, adversary)
    speculation = speculation_of(path, head, late=kind == "late")
    done = asyncio.Event()
    await until(lambda: speculation._client.connected)
    try:
        async with served(runner, speculation, step_s=0.003 if kind in BREAKING else 0.0) as server:
            restarts = (
                asyncio.create_task(restart_now_and_then(draft, adversary, done)) if kind == "restarted" else None
            )
            assert await ask_all(server) == plain
            done.set()
            if restarts is not None:
                await restarts
    finally:
        draft.stop()
    stats = speculation.stats
    assert stats.errors == 0 and stats.client.questions > 1
    assert ("head" in stats.proposers) == with_head
    by_service = stats.proposers.get("scripted")
    if kind in ("right", "random", "truncated"):
        assert by_service is not None and by_service.accepted > 20
    if kind == "wrong":
        assert by_service is not None and by_service.accepted <= 3 < by_service.proposed
    if kind == "late":
        assert stats.client.misses > 0
    if kind in ("stale base", "stale epoch"):
        assert stats.stale > 0
    if kind in BREAKING:
        assert stats.client.connects > 1


class RealDraft(rpc.DraftServiceServicer):
    """The draft service's own sessions and proposers."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer

    def Propose(
        self, request_iterator: Iterator[pb.ProposeRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ProposeResponse]:
        session = Session(self._proposer, epoch=9)
        for question in request_iterator:
            yield session.answer(question)
            session.tidy()
        session.close()


def proposers(names: tuple[str, ...], runner: Runner, plain: Seen) -> list[Proposer]:  # noqa: F811
    """The model is another copy of the target, the table was trained on the outputs to come."""
    made: dict[str, Any] = {
        "ngram": lambda: NgramProposer((3, 2, 1)),
        "suffix": lambda: SuffixProposer(1),
        "table": lambda: build_table([(ids, len(PROMPT)) for ids in known_outputs(plain)], (1, 2, 3), 100_000),
        "model": lambda: ModelProposer(
            load_runner(
                RunnerSettings(
                    runner._settings.model_path,  # type: ignore[attr-defined]
                    numerics="exact",
                    kernels="torch",
                    threads=1,
                    block_size=BLOCK,
                    kv_cache_bytes=4 << 20,
                )
            ),
            4,
        ),
    }
    return [made[name]() for name in names]


EACH = [("ngram",), ("suffix",), ("table",), ("model",), ("ngram", "suffix", "table", "model")]


@pytest.mark.parametrize(
    ("names", "with_head"),
    [
        pytest.param(names, head, marks=() if head == (len(names) > 1) else pytest.mark.slow)
        for names, head in itertools.product(EACH, (False, True))
    ],
)
async def test_no_proposer_changes_what_a_client_gets(
    names: tuple[str, ...],
    with_head: bool,
    path: Path,
    runner: Runner,  # noqa: F811
    plain: Seen,
) -> None:
    parts = proposers(names, runner, plain)
    head = HeadProposer(random_head(runner.spec), runner) if with_head else None
    draft = DraftServer(path, RealDraft(CombinedProposer(parts)))
    speculation = speculation_of(path, head)
    await until(lambda: speculation._client.connected)
    try:
        async with served(runner, speculation) as server:
            assert await ask_all(server) == plain
    finally:
        draft.stop()
        for part in parts:
            part.close()
    stats = speculation.stats
    assert stats.errors == stats.bad == 0
    expected = {*names, *(["head"] if with_head else [])}
    assert set(stats.proposers) <= expected and ("head" in stats.proposers) == with_head
    by_service = [entry for name, entry in stats.proposers.items() if name != "head"]
    assert sum(entry.proposed for entry in by_service) > 20
    # Of a random model n-grams say little that is right; the others know what comes.
    assert names == ("ngram",) or sum(entry.accepted for entry in by_service) > 20
