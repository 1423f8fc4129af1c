"""Training data from the target itself: it writes user turns from the bare chat template, then answers them.

The file holds one JSON object per line: `index` (the seed), `ids`, `answer` (index of the first answer token). Lines
are appended as conversations end, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tandem.lm.types import Runner, SamplingParams, Sequence, Slice

# Index (the seed), ids, index of the first answer token.
Talk = tuple[int, list[int], int]


@dataclass(frozen=True, slots=True)
class Template:
    """A chat format as token ids."""

    # Up to where the user's words begin, between user and assistant, and what ends a turn.
    before_user: tuple[int, ...]
    before_answer: tuple[int, ...]
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to write. Lengths in tokens."""

    seed: int = 0
    max_user: int = 64
    max_answer: int = 256
    batch: int = 32
    user_temperature: float = 1.0
    # Every second answer is greedy, the others use this.
    answer_temperature: float = 0.8
    # An answer ends where so many tokens in a row stand for the third time: it loops.
    loop: int = 8


@dataclass(slots=True, eq=False)
class _Talk:
    """One conversation in a slot of the batch."""

    index: int
    sequence: Sequence
    blocks: list[int]
    computed: int = 0
    answer: int = 0
    runs: Counter[tuple[int, ...]] = field(default_factory=Counter)
    # States that the answer's tokens were sampled from.
    states: list[np.ndarray] = field(default_factory=list)

    @property
    def answering(self) -> bool:
        return self.answer > 0


@dataclass(slots=True)
class Generator:
    """Runs conversations in a fixed number of slots, each with its own blocks."""

    runner: Runner
    template: Template
    plan: Plan
    # User turns given by the caller (files of prompts) come first, each once.
    prompts: Iterator[list[int]] = field(default_factory=lambda: iter(()))
    # Then the user turn of a conversation by its index; None: the target writes it.
    composed: Callable[[int], list[int] | None] = lambda index: None
    seen: set[bytes] = field(default_factory=set)
    # Takes the hidden states of each answer, fp16 [answer tokens, hidden], just before its conversation is yielded.
    keep: Callable[[np.ndarray], None] | None = None
    duplicates: int = 0

    def run(self, first: int) -> Iterator[tuple[int, list[int], int]]:
        """Yields (index, ids, first answer token) of finished conversations, from seed index `first` on, endlessly."""
        size = self.runner.spec.block_size
        longest = (
            len(self.template.before_user)
            + self.plan.max_user
            + len(self.template.before_answer)
            + self.plan.max_answer
        )
        per_slot = -(-(longest + 1) // size)
        slots = min(self.plan.batch, self.runner.spec.num_blocks // per_slot)
        if slots < 1:
            raise ValueError(
                f"the KV cache holds {self.runner.spec.num_blocks} blocks, but a conversation needs {per_slot}"
            )
        talks = [
            self._begin(first + slot, list(range(slot * per_slot, (slot + 1) * per_slot))) for slot in range(slots)
        ]
        following = first + slots
        while True:
            outputs = self.runner.execute(
                [
                    Slice(
                        talk.sequence,
                        talk.blocks,
                        talk.computed,
                        len(talk.sequence.token_ids) - talk.computed,
                        hidden=self.keep is not None and talk.answering,
                    )
                    for talk in talks
                ]
            )
            for slot, (talk, output) in enumerate(zip(talks, outputs, strict=True)):
                talk.computed = len(talk.sequence.token_ids)
                if output.hidden is not None and output.token_ids:
                    talk.states.append(output.hidden[0].astype(np.float16))
                ended = self._step(talk, output.token_ids[0]) if output.token_ids else True
                if ended:
                    if talk.answering and len(talk.sequence.token_ids) > talk.answer:
                        if self.keep is not None:
                            self.keep(np.stack(talk.states))
                        yield talk.index, talk.sequence.token_ids, talk.answer
                    self.runner.forget(talk.sequence.id)
                    talks[slot] = self._begin(following, talk.blocks)
                    following += 1

    def _params(self, index: int, temperature: float, top_p: float = 1.0) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=(self.plan.seed << 32) + index, top_p=top_p)

    def _begin(self, index: int, blocks: list[int]) -> _Talk:
        given = self._given(index)
        start = list(self.template.before_user)
        sequence = Sequence(index, 0, self._params(index, self.plan.user_temperature, top_p=0.95), start, len(start))
        talk = _Talk(index, sequence, blocks)
        if given is not None:
            sequence.token_ids += given
            self._answer(talk)
        return talk

    def _given(self, index: int) -> list[int] | None:
        """The next user turn that was not there yet; None: the target shall write one."""
        for turn in self.prompts:
            if self._new(turn[: self.plan.max_user]):
                return turn[: self.plan.max_user]
        composed = self.composed(index)
        if composed is None or len(composed) > self.plan.max_user or not self._new(composed):
            return None
        return composed

    def _new(self, user: list[int]) -> bool:
        mark = turn_mark(user)
        if len(user) < 3 or mark in self.seen:
            self.duplicates += 1
            return False
        self.seen.add(mark)
        return True

    def _step(self, talk: _Talk, token: int) -> bool:
        """Adds a token; True if the conversation is over (or not worth going on)."""
        ids, stop = talk.sequence.token_ids, token in self.template.stop_ids
        if talk.answering:
            ids.append(token)
            return stop or len(ids) - talk.answer >= self.plan.max_answer or self._loops(talk)
        if not stop:
            ids.append(token)
            if len(ids) - len(self.template.before_user) < self.plan.max_user:
                return False
        if not self._new(ids[len(self.template.before_user) :]):
            return True
        self._answer(talk)
        return False

    def _loops(self, talk: _Talk) -> bool:
        last = tuple(talk.sequence.token_ids[max(talk.answer, len(talk.sequence.token_ids) - self.plan.loop) :])
        if len(last) == self.plan.loop:
            talk.runs[last] += 1
        return talk.runs[last] >= 3

    def _answer(self, talk: _Talk) -> None:
        """Turns to the assistant. What was computed stays valid."""
        old = talk.sequence
        old.token_ids += self.template.before_answer
        temperature = self.plan.answer_temperature if talk.index % 2 else 0.0
        talk.answer = len(old.token_ids)
        talk.sequence = Sequence(old.id, 0, self._params(talk.index, temperature), old.token_ids, talk.answer)


def turn_mark(user: list[int]) -> bytes:
    """What a user turn is known by: 8 bytes."""
    return hashlib.blake2b(json.dumps(user).encode(), digest_size=8).digest()


def marks(talks: Iterable[tuple[int, list[int], int]], template: Template) -> set[bytes]:
    """The user turns of these conversations."""
    start, end = len(template.before_user), len(template.before_answer)
    return {turn_mark(ids[start : answer - end]) for _, ids, answer in talks}


def read(path: Path) -> list[tuple[int, list[int], int]]:
    """Conversations of a data file; a last line that was cut off is left out."""
    found = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
                found.append((int(entry["index"]), [int(token) for token in entry["ids"]], int(entry["answer"])))
            except (ValueError, KeyError, TypeError):
                continue
    return found


def append(path: Path, talks: Iterable[tuple[int, list[int], int]]) -> None:
    """Adds conversations; starts a new line first if the file ends in a cut-off one."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        for index, ids, answer in talks:
            file.write(json.dumps({"index": index, "ids": ids, "answer": answer}).encode() + b"\n")
