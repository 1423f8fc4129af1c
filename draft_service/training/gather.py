"""Gathering: the target writes conversations into a directory, and for a head its hidden states beside them."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draft_service.training import logged, states
from draft_service.training.forced import read_states
from draft_service.training.generate import Generator, Plan, Talk, Template, append, marks, read
from draft_service.training.topics import compose
from tandem.lm.types import Runner
from tandem.tokenizer import Tokenizer, load_bundle

_SAVE_EVERY_S = 10.0


class GatherError(ValueError):
    """A directory of conversations that does not fit what is asked."""


@dataclass(frozen=True, slots=True)
class Place:
    """A directory of conversations."""

    path: Path

    @property
    def talks(self) -> Path:
        return self.path / "data.jsonl"

    @property
    def states(self) -> Path:
        return self.path / "states.f16"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def logged(self) -> bool:
        """Whether its conversations are logged traffic rather than the target's own."""
        return self.path.name == logged.FOLDER

    def seed(self) -> int:
        """Raises GatherError if the directory does not say with what seed it was written."""
        try:
            return int(json.loads(self.plan.read_text())["seed"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GatherError(f"{self.plan} does not tell the seed of these conversations: {error}") from error

    def claim(self, plan: dict[str, object]) -> None:
        """Notes how conversations are written here. Raises GatherError if they were written otherwise before."""
        if self.plan.exists():
            before = json.loads(self.plan.read_text())
            if before != plan:
                raise GatherError(f"{self.path} holds conversations written with {before}, not {plan}")
        elif self.talks.exists():
            raise GatherError(f"{self.talks} has conversations, but {self.plan} is missing")
        else:
            self.plan.write_text(json.dumps(plan) + "\n")


def gather(options: argparse.Namespace, place: Place) -> float:
    """Lets the target write until there are enough tokens or the time is up. Returns the seconds spent.

    Raises:
        GatherError: the directory holds conversations of another plan.
        StatesError: hidden states are wanted, but the conversations there came without.
    """
    plan = Plan(options.seed, options.max_user, options.max_answer, options.batch)
    told = {"seed": plan.seed, "max_user": plan.max_user, "max_answer": plan.max_answer, "target": options.target}
    place.claim(told)
    known = read(place.talks)
    have = count_tokens([(ids, answer) for _, ids, answer in known])
    began = time.monotonic()
    if have >= options.tokens:
        return 0.0
    from tandem.lm.runner import load_runner
    from tandem.lm.runner_settings import RunnerSettings
    from tandem.models.store import resolve

    path = resolve(options.target).path
    bundle = load_bundle(path)
    tokenizer = Tokenizer(bundle)
    runner = load_runner(
        RunnerSettings(path, threads=options.threads, kernels=options.kernels, max_num_seqs=options.batch)
    )
    template = chat_template(bundle.chat_template, tokenizer, options.system)

    def composed(index: int) -> list[int] | None:
        """Of every four conversations two have a composed user turn: one answered greedily, one sampled."""
        return tokenizer.encode(compose(options.seed, index)) if index % 4 < 2 else None

    generator = Generator(runner, template, plan, prompts(options.data, tokenizer), composed, marks(known, template))
    first = 1 + max((index for index, _, _ in known), default=-1)
    writer = Writer(place, runner.spec.hidden_size if options.kind == "head" else 0, known)
    try:
        write(generator, first, have, options.tokens, began + 3600 * options.hours, writer)
    finally:
        runner.close()
    return time.monotonic() - began


def gather_logged(options: argparse.Namespace, place: Place) -> float:
    """Takes logged traffic, and for a head reads the target's hidden states of it. Returns the seconds spent.

    Raises:
        GatherError: the directory holds traffic that was taken otherwise.
        TrafficError: a log that cannot be used. ForcedError: a request that the model cannot hold.
    """
    place.path.mkdir(exist_ok=True)
    paths = [str(path) for path in options.traffic]
    place.claim({"traffic": paths, "traffic_tokens": options.traffic_tokens, "target": options.target})
    logged.take(options, place.path)
    began = time.monotonic()
    talks = read(place.talks)
    if options.kind != "head":
        return time.monotonic() - began
    from tandem.lm.runner import load_runner
    from tandem.lm.runner_settings import RunnerSettings
    from tandem.models.store import resolve

    path = resolve(options.target).path
    runner = load_runner(RunnerSettings(path, threads=options.threads, kernels=options.kernels))
    try:
        read_logged(runner, place.states, talks)
    finally:
        runner.close()
    return time.monotonic() - began


def read_logged(runner: Runner, path: Path, talks: list[Talk]) -> None:
    """Adds the hidden states that are still missing, with a line of progress. Raises ForcedError."""
    there = states.whole(path, talks, runner.spec.hidden_size)
    if there == len(talks):
        return
    done, goal = there, len(talks)
    with path.open("ab") as file:

        def keep(rows: np.ndarray) -> None:
            nonlocal done
            file.write(rows.tobytes())
            done += 1
            if done % 16 == 0 or done == goal:
                print(f"\r{done:,} of {goal:,} logged answers read ({done / goal:.0%})   ", end="", flush=True)

        read_states(runner, talks[there:], keep)
    print()


class Writer:
    """Appends conversations, and before them their hidden states if there are to be some (`hidden` > 0)."""

    def __init__(self, place: Place, hidden: int, known: list[Talk]) -> None:
        """Raises StatesError if states of the conversations there are missing."""
        self._place, self._hidden = place, hidden
        self._talks: list[Talk] = []
        self._states: list[np.ndarray] = []
        if hidden:
            states.fit(place.states, known, hidden)

    def listen(self, generator: Generator) -> None:
        generator.keep = self._states.append if self._hidden else None

    def add(self, talk: Talk) -> None:
        self._talks.append(talk)

    def flush(self) -> None:
        if self._states:
            with self._place.states.open("ab") as file:
                for rows in self._states:
                    file.write(rows.tobytes())
        append(self._place.talks, self._talks)
        self._talks.clear()
        self._states.clear()


def write(generator: Generator, first: int, have: int, goal: int, deadline: float, writer: Writer) -> None:
    """Writes conversations every few seconds, with a line of progress."""
    writer.listen(generator)
    began = saved = time.monotonic()
    total = have
    for talk in generator.run(first):
        writer.add(talk)
        total += len(talk[1]) - talk[2]
        if total >= goal:
            break
        now = time.monotonic()
        if now - saved > _SAVE_EVERY_S:
            writer.flush()
            saved = now
            if now > deadline:
                break
            speed = (total - have) / (now - began)
            print(
                f"\r{total:,} of {goal:,} answer tokens ({total / goal:.0%}), {speed:.0f} a second   ",
                end="",
                flush=True,
            )
    writer.flush()
    print(f"\n{total:,} answer tokens, {generator.duplicates} user turns were short or seen before")


def count_tokens(answers: list[tuple[list[int], int]]) -> int:
    return sum(len(ids) - first for ids, first in answers)


def chat_template(source: str, tokenizer: Tokenizer, system: str | None) -> Template:
    """Splits the model's chat template around a marker in the user's place.

    Raises:
        ValueError: the template does not show the user's words.
    """
    import jinja2

    marker = "\N{SYMBOL FOR NULL}"
    messages = [{"role": "user", "content": marker}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(source).render(messages=messages, add_generation_prompt=True)
    before, found, after = text.partition(marker)
    if not found:
        raise ValueError("the chat template does not show the user's words")
    return Template(
        tuple(tokenizer.encode(before)), tuple(tokenizer.encode(after)), frozenset(tokenizer.stop_token_ids)
    )


def prompts(files: list[Path], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """User turns of prompt files, one per line."""
    for file in files:
        for line in file.read_text().splitlines():
            if line.strip():
                yield tokenizer.encode(line.strip())
