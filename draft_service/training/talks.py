"""Conversations of one or more directories, divided into those to learn from and those held out."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

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


def divide(places: list[Place]) -> Divided:
    """Raises GatherError if either part would be empty."""
    talks = [read(place.talks) for place in places]
    learnt = {_prompt(talk) for part in talks for talk in part if not _for_test(talk)}
    found: list[set[int]] = []
    dropped: list[set[int]] = []
    for part in talks:
        candidates = [talk for talk in part if _for_test(talk)]
        found.append({talk[0] for talk in candidates if _prompt(talk) not in learnt})
        dropped.append({talk[0] for talk in candidates} - found[-1])
    divided = Divided(places, talks, found, dropped)
    if not divided.train() or not divided.test():
        raise GatherError(
            f"{sum(map(len, talks))} conversations are too few: at least one for training and one held out are needed"
        )
    return divided


def of_options(options: argparse.Namespace) -> Divided:
    """Conversations of --out and --also."""
    paths: list[Path] = [options.out, *options.also]
    return divide([Place(path) for path in paths])


def describe(divided: Divided) -> dict[str, object]:
    """What a card says of the data."""
    train, test = divided.train(), divided.test()
    return {
        "seeds": [place.seed() for place in divided.places],
        "conversations": len(train),
        "answer_tokens": count_tokens([(ids, answer) for _, ids, answer in train]),
        "held_out_conversations": len(test),
        "held_out_tokens": count_tokens([(ids, answer) for _, ids, answer in test]),
    }


def _for_test(talk: Talk) -> bool:
    return talk[0] // _KINDS % _HELD_OUT == 0


def _prompt(talk: Talk) -> bytes:
    return turn_mark(talk[1][: talk[2]])
