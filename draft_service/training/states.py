"""Hidden states of the target for training a head: one fp16 row per answer token, the state that it was sampled from.

They lie in a file beside the conversations, row after row in the order of the answers there. Rows are written before
their conversations, so after a stop the file may be too long, but never too short.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draft_service.training.generate import Talk


class StatesError(ValueError):
    """The file of states does not belong to the conversations."""


def fit(path: Path, talks: Sequence[Talk], hidden: int) -> None:
    """Cuts off rows of conversations that were never written.

    Raises:
        StatesError: rows are missing.
    """
    want = 2 * hidden * sum(len(ids) - answer for _, ids, answer in talks)
    have = path.stat().st_size if path.exists() else 0
    if have < want:
        raise StatesError(f"{path} has {have} bytes of hidden states, but its conversations need {want}")
    if have > want:
        os.truncate(path, want)


def whole(path: Path, talks: Sequence[Talk], hidden: int) -> int:
    """How many conversations, from the first on, have all their rows; cuts off what is there of the next."""
    have = path.stat().st_size if path.exists() else 0
    total = count = 0
    for _, ids, answer in talks:
        size = 2 * hidden * (len(ids) - answer)
        if total + size > have:
            break
        total, count = total + size, count + 1
    if have > total:
        os.truncate(path, total)
    return count


@dataclass(frozen=True, eq=False)
class Corpus:
    """Answers one after the other. Row i: hidden[i] is the state that tokens[i] was sampled from."""

    # fp16 [N, hidden], int64 [N].
    hidden: np.ndarray
    tokens: np.ndarray
    # Answer tokens behind this one: int64 [N]; index of the conversation: int64 [N]; place in the answer: int64 [N].
    left: np.ndarray
    talk: np.ndarray
    place: np.ndarray
    # How the answers were drawn, where that differs by answer: fp32 [N], 0 is greedy; choice index: int64 [N].
    temperature: np.ndarray | None = None
    choice: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def where(self, rows: np.ndarray) -> Corpus:
        """Whole answers only: `rows` is a mask that takes or leaves all rows of a conversation."""
        return Corpus(*(None if part is None else part[rows] for part in self.columns()))  # type: ignore[arg-type]

    def columns(self) -> tuple[np.ndarray | None, ...]:
        """All fields, in order."""
        return (self.hidden, self.tokens, self.left, self.talk, self.place, self.temperature, self.choice)


def load(path: Path, talks: Sequence[Talk], hidden: int) -> Corpus:
    """Raises StatesError if the file has not one row per answer token."""
    lengths = np.array([len(ids) - answer for _, ids, answer in talks], np.int64)
    total = int(lengths.sum())
    size = path.stat().st_size if path.exists() else 0
    if size != 2 * hidden * total or not total:
        raise StatesError(f"{path} has {size} bytes, but {total} answer tokens of {hidden} numbers need others")
    states = np.memmap(path, np.float16, "r", shape=(total, hidden))
    tokens = np.concatenate([np.asarray(ids[answer:], np.int64) for _, ids, answer in talks])
    ends = np.repeat(np.cumsum(lengths), lengths)
    indices = np.repeat(np.array([index for index, _, _ in talks], np.int64), lengths)
    at = np.arange(total)
    return Corpus(states, tokens, ends - at - 1, indices, at - (ends - np.repeat(lengths, lengths)))


def join(parts: Sequence[Corpus]) -> Corpus:
    """Corpora one after the other, in memory. All say how they were drawn, or none does."""
    columns = zip(*(part.columns() for part in parts), strict=True)
    return Corpus(*(None if column[0] is None else np.concatenate(column) for column in columns))  # type: ignore[arg-type]
