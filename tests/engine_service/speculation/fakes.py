"""A step loop without a model, and draft servers that speak the real protocol, well or badly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np

from engine_service.speculation import Draft, SpecCandidate, SpeculationController
from tandem.draft.v1 import draft_pb2 as pb
from tandem.draft.v1 import draft_pb2_grpc as rpc
from tandem.lm.types import SamplingParams, Sequence
from tandem.rpc import SERVER_OPTIONS

VOCAB = 50
Target = Callable[[list[int]], int]


def mixing(tokens: list[int]) -> int:
    """A target whose next token depends on the last three, with many repeats."""
    a, b, c = tokens[-1], tokens[-2], tokens[-3]
    return (a * 7 + b * 3 + c + (len(tokens) // 16)) % 11


def looping(tokens: list[int]) -> int:
    """A target that repeats a cycle of 12 ids."""
    return 20 + (len(tokens) % 12)


def solo(target: Target, prompt: list[int], count: int) -> list[int]:
    """What the target writes alone, without drafts."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(target(tokens))
    return tokens[len(prompt) :]


class FakeLoop:
    """Steps sequences as the engine does: plan, verify by keep-while-equal, commit, report."""

    def __init__(
        self,
        controller: SpeculationController,
        target: Target,
        cost: Callable[[int], float] = lambda rows: 5.0 + 0.2 * rows,
        pause_s: float = 0.0,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        """cost: milliseconds reported for a step by sampled rows. pause_s: real time that a step takes.
        ready: waited for before each step, so that a busy machine changes nothing."""
        self.controller = controller
        self.target = target
        self.cost = cost
        self.pause_s = pause_s
        self.ready = ready
        self.running: list[Sequence] = []
        self.goal: dict[int, int] = {}
        self.steps = 0
        self.rows = 0
        self.fake_ms = 0.0
        self.drafts: list[dict[int, Draft]] = []
        self._next_id = 1

    def add(self, prompt: list[int], count: int, salt: str = "", params: SamplingParams | None = None) -> Sequence:
        params = params or SamplingParams(temperature=0.0)
        sequence = Sequence(self._next_id, 0, params, list(prompt), len(prompt))
        self._next_id += 1
        self.goal[sequence.id] = count
        self.running.append(sequence)
        self.controller.started(sequence, salt)
        # Prefill samples the first token.
        sequence.token_ids.append(self.target(sequence.token_ids))
        return sequence

    def step(self) -> None:
        if self.ready is not None:
            wait_until(self.ready)
        candidates = [
            SpecCandidate(sequence, min(32, self.goal[sequence.id] - sequence.output_len - 1), False)
            for sequence in self.running
        ]
        drafts = self.controller.propose(candidates)
        self.drafts.append(drafts)
        if self.pause_s:
            time.sleep(self.pause_s)
        rows, hidden = 0, self.controller.wants_hidden()
        for sequence in self.running:
            draft = drafts.get(sequence.id, Draft((), ""))
            committed = self._verify(sequence, draft.ids)
            rows += 1 + len(draft.ids)
            sequence.token_ids.extend(committed)
            self.controller.observe(sequence.id, draft.proposer, len(draft.ids), len(committed) - 1, committed)
            if hidden:
                self.controller.keep_hidden(sequence.id, np.zeros(4, np.float32))
        for sequence in [s for s in self.running if s.output_len >= self.goal[s.id]]:
            self.running.remove(sequence)
            self.controller.finished(sequence.id)
        took = self.cost(rows)
        self.controller.step_done(rows, 0, took)
        self.steps += 1
        self.rows += rows
        self.fake_ms += took

    def _verify(self, sequence: Sequence, drafts: tuple[int, ...]) -> list[int]:
        committed: list[int] = []
        room = self.goal[sequence.id] - sequence.output_len
        for draft in (*drafts, None):
            sampled = self.target(sequence.token_ids + committed)
            committed.append(sampled)
            if sampled != draft or len(committed) == room:
                break
        return committed

    def run(self, limit: int = 100_000) -> None:
        while self.running and self.steps < limit:
            self.step()


class ScriptedDraft(rpc.DraftServiceServicer):
    """Answers each question by a function of (question, tokens by sequence), on a real server."""

    def __init__(
        self, script: Callable[[pb.ProposeRequest, dict[int, list[int]]], Iterator[pb.ProposeResponse]]
    ) -> None:
        self.script = script
        self.tokens: dict[int, list[int]] = {}
        self.questions = 0
        self.streams = 0
        self.finished: list[int] = []

    def Propose(
        self, request_iterator: Iterator[pb.ProposeRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ProposeResponse]:
        self.streams += 1
        self.tokens.clear()
        for question in request_iterator:
            self.questions += 1
            for update in question.sequences:
                if update.base_len == 0:
                    self.tokens[update.id] = []
                known = self.tokens.setdefault(update.id, [])
                assert len(known) == update.base_len, "the engine lost the thread"
                known.extend(update.new_ids)
            self.finished += question.finished
            yield from self.script(question, self.tokens)


class DraftServer:
    """A sync gRPC server on a Unix socket."""

    def __init__(self, path: Path, servicer: rpc.DraftServiceServicer) -> None:
        self.address = f"unix:{path}"
        self.servicer = servicer
        self._server: grpc.Server | None = None
        self.start()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(4), options=list(SERVER_OPTIONS))
        rpc.add_DraftServiceServicer_to_server(self.servicer, self._server)
        assert self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None


def answer_with(
    guess: Callable[[list[int], int], list[int]], epoch: int = 77
) -> Callable[[pb.ProposeRequest, dict[int, list[int]]], Iterator[pb.ProposeResponse]]:
    """A script that answers every wanted sequence with guess(tokens, want)."""

    def script(question: pb.ProposeRequest, tokens: dict[int, list[int]]) -> Iterator[pb.ProposeResponse]:
        response = pb.ProposeResponse(step=question.step, draft_epoch=epoch)
        for update in question.sequences:
            if update.want:
                known = tokens[update.id]
                ids = guess(known, update.want)
                response.proposals.add(
                    id=update.id,
                    status=pb.PROPOSAL_STATUS_OK,
                    base_len=len(known),
                    draft_ids=ids,
                    proposer="scripted",
                    confidence=0.9,
                )
        yield response

    return script


def always_right(target: Target) -> Callable[[list[int], int], list[int]]:
    return lambda tokens, want: solo(target, tokens, want)


def always_wrong(target: Target) -> Callable[[list[int], int], list[int]]:
    return lambda tokens, want: [(target(tokens) + 1) % VOCAB] * want


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Fails if the condition does not come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("condition did not come true")
        threading.Event().wait(0.005)
