"""Logged traffic as conversations to learn from: taken once, without repeats, held out by request.

What is taken stays in OUT/traffic, mode 0600 since it is users' text: conversations as `generate` has them, each line
with `temperature`, `seed` and `choice` besides. Even indices are greedy answers, odd ones sampled. A training that is
stopped goes on with the same requests, whatever has been logged since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draft_service.training.generate import Talk
from tandem import traffic
from tandem.traffic import Entry, Header

FOLDER = "traffic"
# Longer requests are left out: their prompts cost more to read than their answers teach.
_LONGEST = 4_096
# Of every so many groups of requests one is held out.
_HELD_OUT = 20


@dataclass(frozen=True, slots=True)
class Draw:
    """How an answer was sampled."""

    temperature: float
    seed: int
    choice: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of one request."""

    ids: list[int]
    first: int
    draw: Draw


def collect(entries: Iterable[Entry], tokens: int, longest: int = _LONGEST) -> list[Answer]:
    """The newest answers with `tokens` answer tokens in all, oldest first; equal ones once. Holds no more than that."""
    kept: dict[bytes, Answer] = {}
    total = 0
    for entry in entries:
        for choice, output in enumerate(entry.outputs):
            ids = [*entry.prompt, *output]
            # One token shows no draft to be right.
            if len(output) < 2 or len(ids) > longest:
                continue
            mark = hashlib.blake2b(json.dumps([len(entry.prompt), ids]).encode(), digest_size=16).digest()
            total += len(output) - _size(kept.pop(mark, None))
            kept[mark] = Answer(ids, len(entry.prompt), Draw(entry.temperature, entry.seed, choice))
        while kept and total - _size(oldest := next(iter(kept.values()))) >= tokens:
            kept.pop(next(iter(kept)))
            total -= _size(oldest)
    return list(kept.values())


def _size(answer: Answer | None) -> int:
    return len(answer.ids) - answer.first if answer is not None else 0


def held_out(talks: list[Talk]) -> set[int]:
    """Indices of the conversations to measure on. All that begin with the same request are on the same side: its other
    choices, its repeats, and later turns of its conversation, whose prompts begin with its own."""
    ordered = sorted(talks, key=lambda talk: talk[1][: talk[2]])
    groups: dict[bytes, list[int]] = {}
    root: list[int] = []
    for index, ids, first in ordered:
        # What begins with the root follows it at once in this order.
        if not root or ids[: len(root)] != root:
            root = ids[:first]
        mark = hashlib.blake2b(json.dumps(root).encode(), digest_size=8).digest()
        groups.setdefault(mark, []).append(index)
    chosen = [mark for mark in groups if int.from_bytes(mark, "little") % _HELD_OUT == 0]
    if not chosen and len(groups) > 1:
        chosen = [min(groups)]
    return {index for mark in chosen for index in groups[mark]}


def write(path: Path, answers: list[Answer]) -> None:
    """The conversations of `answers`, all or nothing."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        for number, answer in enumerate(answers):
            draw = answer.draw
            line = {
                "index": 2 * number + (draw.temperature > 0),
                "ids": answer.ids,
                "answer": answer.first,
                "temperature": draw.temperature,
                "seed": draw.seed,
                "choice": draw.choice,
            }
            file.write(json.dumps(line) + "\n")
    partial.replace(path)


def draws(path: Path) -> dict[int, Draw]:
    """How each conversation of a file was sampled, by index."""
    found = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        found[int(entry["index"])] = Draw(float(entry["temperature"]), int(entry["seed"]), int(entry["choice"]))
    return found


def take(options: argparse.Namespace, folder: Path) -> None:
    """Brings the traffic of options.traffic into a directory, unless it is there already.

    Raises:
        TrafficError: there is none, or not of this target.
    """
    data = folder / "data.jsonl"
    if data.exists():
        return
    header = header_of(options.target)
    entries = (entry for path in options.traffic for entry in traffic.read(path, header))
    answers = collect(entries, options.traffic_tokens)
    if not answers:
        raise traffic.TrafficError(f"{', '.join(map(str, options.traffic))}: no answer of two tokens or more")
    write(data, answers)
    print(f"{len(answers):,} answers of logged traffic, {sum(map(_size, answers)):,} tokens")


def header_of(target: str) -> Header:
    """What traffic of this model says of itself."""
    from tandem.lm.weights import open_source
    from tandem.models.store import resolve
    from tandem.tokenizer import load_bundle

    path = resolve(target).path
    source = open_source(path)
    try:
        return Header(source.digest(), load_bundle(path).digest, source.config.vocab_size)
    finally:
        source.close()


def per_row(found: np.ndarray, known: dict[int, Draw]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seeds uint64, choices int64 and temperatures fp32 [N] of rows with these conversation indices."""
    indices, inverse = np.unique(found, return_inverse=True)
    of = [known[int(index)] for index in indices]
    seeds = np.array([draw.seed for draw in of], np.uint64)
    choices = np.array([draw.choice for draw in of], np.int64)
    temperatures = np.array([draw.temperature for draw in of], np.float32)
    return seeds[inverse], choices[inverse], temperatures[inverse]
