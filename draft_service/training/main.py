"""`tandem draft train`: generate, fit, measure, write table and card. Each stage goes on where it was interrupted."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from draft_service.training.generate import Generator, Plan, Template, append, read
from draft_service.training.measure import measure
from tandem.lm.proposers.table import build
from tandem.tokenizer import Tokenizer, load_bundle

_HELD_OUT = 20
_SAVE_EVERY_S = 10.0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser("tandem draft train", description="Distils a draft table from a target model.")
    result.add_argument(
        "--target", default="smollm2-135m-instruct", help="model name, directory or .gguf of the target"
    )
    result.add_argument("--out", type=Path, required=True, help="directory for data.jsonl, draft.npz and card.json")
    result.add_argument("--data", type=Path, nargs="*", default=[], help="files of user prompts, one per line")
    result.add_argument("--system", default=None, help="system prompt; default: the chat template's own")
    result.add_argument("--tokens", type=int, default=500_000, help="answer tokens to gather, those there included")
    result.add_argument("--hours", type=float, default=3.0, help="longest time for gathering")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--batch", type=int, default=32, help="conversations at a time")
    result.add_argument("--max-user", type=int, default=64, help="tokens of a user turn")
    result.add_argument("--max-answer", type=int, default=256, help="tokens of an answer")
    result.add_argument("--orders", default="1,2,3,4", help="context lengths of the table")
    result.add_argument("--max-bytes", type=int, default=6_000_000, help="size of the table")
    result.add_argument("--threads", type=int, default=0)
    result.add_argument("--kernels", default="auto", help="auto, torch or native")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code. Raises SystemExit on wrong arguments."""
    options = parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    data = options.out / "data.jsonl"
    spent = gather(options, data)
    talks = read(data)
    train = [(ids, answer) for index, ids, answer in talks if index % _HELD_OUT]
    held_out = [(ids, answer) for index, ids, answer in talks if not index % _HELD_OUT]
    if not train or not held_out:
        print(f"{len(talks)} conversations are too few: at least one for training and one held out are needed")
        return 1
    orders = tuple(int(part) for part in options.orders.split(","))
    table = build(train, orders, options.max_bytes)
    table.save(options.out / "draft.npz")
    card = {
        "kind": "n-gram table",
        "target": options.target,
        "seed": options.seed,
        "conversations": len(talks),
        "answer_tokens": count_tokens(train),
        "held_out_tokens": count_tokens(held_out),
        "gathering_seconds": round(spent, 1),
        "bytes": table.size_bytes,
        "orders": list(orders),
        "held_out_all": report(held_out, table),
        "held_out_greedy": report([(i, a) for n, i, a in talks if n % (2 * _HELD_OUT) == 0], table),
    }
    (options.out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    print(json.dumps(card, indent=1))
    return 0


def count_tokens(answers: list[tuple[list[int], int]]) -> int:
    return sum(len(ids) - first for ids, first in answers)


def report(answers: list[tuple[list[int], int]], table: object) -> dict[str, object]:
    """Acceptance of the table over these answers."""
    found = measure(answers, lambda ids, most: table.draft(ids, most).ids)  # type: ignore[attr-defined]
    return {
        "acceptance_by_position": found.by_position(),
        "acceptance_length": round(found.length, 4),
        "share_of_positions_with_drafts": round(found.proposed / max(1, found.positions), 4),
    }


def gather(options: argparse.Namespace, data: Path) -> float:
    """Lets the target write until there are enough tokens or the time is up. Returns the seconds spent."""
    known = read(data)
    have = sum(len(ids) - answer for _, ids, answer in known)
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
    plan = Plan(options.seed, options.max_user, options.max_answer, options.batch)
    generator = Generator(
        runner, chat_template(bundle.chat_template, tokenizer, options.system), plan, prompts(options.data, tokenizer)
    )
    first = 1 + max((index for index, _, _ in known), default=-1)
    try:
        write(generator, first, have, options.tokens, began + 3600 * options.hours, data)
    finally:
        runner.close()
    return time.monotonic() - began


def write(generator: Generator, first: int, have: int, goal: int, deadline: float, data: Path) -> None:
    """Appends conversations every few seconds, with a line of progress."""
    fresh: list[tuple[int, list[int], int]] = []
    began = saved = time.monotonic()
    total = have
    for talk in generator.run(first):
        fresh.append(talk)
        total += len(talk[1]) - talk[2]
        if total >= goal:
            break
        now = time.monotonic()
        if now - saved > _SAVE_EVERY_S:
            append(data, fresh)
            fresh, saved = [], now
            if now > deadline:
                break
            speed = (total - have) / (now - began)
            print(
                f"\r{total:,} of {goal:,} answer tokens ({total / goal:.0%}), {speed:.0f} a second   ",
                end="",
                flush=True,
            )
    append(data, fresh)
    print(f"\n{total:,} answer tokens, {generator.duplicates} user turns were short or seen before")


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
