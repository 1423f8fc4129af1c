"""Conversations of one or more directories, divided into those to learn from and those held out."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from draft_service.training import logged
from draft_service.training.gather import GatherError, Place, count_tokens
from draft_service.training.generate import Talk, read, turn_mark

# Of every so many groups of conversations one is held out. A group has one conversation of each kind: user turn
# composed or the target's own, answer greedy or sampled.
_HELD_OUT = 20
_KINDS = 4


@dataclass(frozen=True, slots=True)
class Divided:
    """Per directory, in order: its conversations, and which of them are held out; `dropped` are in neither part.

    A held-out conversation whose prompt was also learnt from is dropped: it would flatter.
    """

    places: list[Place]
    talks: list[list[Talk]]
    held_out: list[set[int]]
    dropped: list[set[int]]

    def train(self) -> list[Talk]:
        return [
            talk
            for talks, held, dropped in zip(self.talks, self.held_out, self.dropped, strict=True)
            for talk in talks
            if talk[0] not in held and talk[0] not in dropped
        ]

    def test(self) -> list[Talk]:
        return [
            talk for talks, held in zip(self.talks, self.held_out, strict=True) for talk in talks if talk[0] in held
        ]

    def logged(self) -> Divided | None:
        """The part that is logged traffic; None: there is none."""
        rows = [number for number, place in enumerate(self.places) if place.logged]
        parts = (self.places, self.talks, self.held_out, self.dropped)
        return Divided(*([part[row] for row in rows] for part in parts)) if rows else None  # type: ignore[arg-type]


def divide(places: list[Place]) -> Divided:
    """Raises GatherError if either part would be empty."""
    talks = [read(place.talks) for place in places]
    for_test = [
        logged.held_out(part) if place.logged else {talk[0] for talk in part if _for_test(talk)}
        for place, part in zip(places, talks, strict=True)
    ]
    learnt = {_prompt(talk) for part, test in zip(talks, for_test, strict=True) for talk in part if talk[0] not in test}
    found: list[set[int]] = []
    dropped: list[set[int]] = []
    for part, test in zip(talks, for_test, strict=True):
        candidates = [talk for talk in part if talk[0] in test]
        found.append({talk[0] for talk in candidates if _prompt(talk) not in learnt})
        dropped.append({talk[0] for talk in candidates} - found[-1])
    divided = Divided(places, talks, found, dropped)
    if not divided.train() or not divided.test():
        raise GatherError(
            f"{sum(map(len, talks))} conversations are too few: at least one for training and one held out are needed"
        )
    return divided


def of_options(options: argparse.Namespace) -> Divided:
    """Conversations of --out and --also, and of --traffic."""
    paths: list[Path] = [options.out, *options.also]
    if options.traffic:
        paths.append(options.out / logged.FOLDER)
    return divide([Place(path) for path in paths])


def describe(divided: Divided) -> dict[str, object]:
    """What a card says of the data."""
    train, test = divided.train(), divided.test()
    card: dict[str, object] = {
        "seeds": [
            place.seed()
            for place, talks in zip(divided.places, divided.talks, strict=True)
            if talks and not place.logged
        ],
        "conversations": len(train),
        "answer_tokens": count_tokens([(ids, answer) for _, ids, answer in train]),
        "held_out_conversations": len(test),
        "held_out_tokens": count_tokens([(ids, answer) for _, ids, answer in test]),
    }
    if (part := divided.logged()) is not None:
        learnt, measured = part.train(), part.test()
        card["logged_answers"] = len(learnt)
        card["logged_tokens"] = count_tokens([(ids, answer) for _, ids, answer in learnt])
        card["held_out_logged_answers"] = len(measured)
        card["held_out_logged_tokens"] = count_tokens([(ids, answer) for _, ids, answer in measured])
    return card


def _for_test(talk: Talk) -> bool:
    return talk[0] // _KINDS % _HELD_OUT == 0


def _prompt(talk: Talk) -> bytes:
    return turn_mark(talk[1][: talk[2]])
