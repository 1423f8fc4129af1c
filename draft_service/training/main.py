"""`tandem draft train`: gather, fit, measure, write draft and card. Each stage goes on where it was interrupted."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from draft_service.training import head, table
from draft_service.training.forced import ForcedError
from draft_service.training.gather import GatherError, Place, gather, gather_logged
from draft_service.training.head_fit import CheckpointError
from draft_service.training.logged import FOLDER
from draft_service.training.states import StatesError
from tandem.lm.proposers.head_file import BLOCK_BYTES
from tandem.traffic import TrafficError

_FORMS = ("F32", "F16", "BF16", *BLOCK_BYTES)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser("tandem draft train", description="Distils a draft from a target model.")
    result.add_argument("--kind", choices=("table", "head"), default="table", help="what is trained")
    result.add_argument(
        "--target", default="smollm2-135m-instruct", help="model name, directory or .gguf of the target"
    )
    result.add_argument("--out", type=Path, required=True, help="directory for conversations, draft and card")
    result.add_argument("--data", type=Path, nargs="*", default=[], help="files of user prompts, one per line")
    result.add_argument(
        "--also", type=Path, nargs="*", default=[], help="directories of further conversations, of other seeds"
    )
    result.add_argument(
        "--traffic", type=Path, nargs="*", default=[], help="directories of an engine's --traffic-log, learnt from too"
    )
    result.add_argument("--traffic-tokens", type=int, default=500_000, help="answer tokens of them to take, the newest")
    result.add_argument("--system", default=None, help="system prompt; default: the chat template's own")
    result.add_argument("--tokens", type=int, default=500_000, help="answer tokens to gather, those there included")
    result.add_argument("--hours", type=float, default=3.0, help="longest time for gathering")
    result.add_argument("--gather-only", action="store_true", help="write conversations, and train nothing")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--batch", type=int, default=32, help="conversations at a time")
    result.add_argument("--max-user", type=int, default=64, help="tokens of a user turn")
    result.add_argument("--max-answer", type=int, default=256, help="tokens of an answer")
    result.add_argument("--threads", type=int, default=0)
    result.add_argument("--kernels", default="auto", help="auto, torch or native")
    of_table = result.add_argument_group("table")
    of_table.add_argument("--orders", default="1,2,3,4", help="context lengths of the table")
    of_table.add_argument("--max-bytes", type=int, default=6_000_000, help="size of the table")
    of_head = result.add_argument_group("head")
    of_head.add_argument("--intermediate", type=int, default=512, help="width of the head's MLP, a multiple of 32")
    of_head.add_argument("--vocab", type=int, default=8192, help="ids that the head can draft")
    of_head.add_argument("--epochs", type=float, default=4.0, help="passes over the answers")
    of_head.add_argument("--rows", type=int, default=256, help="answer positions per optimizer step")
    of_head.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    of_head.add_argument("--weights", choices=_FORMS, default="Q8_0", help="form of the MLP's matrices in the file")
    of_head.add_argument("--out-weights", choices=_FORMS, default="Q4_0", help="form of the output matrix in the file")
    return result


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code. Raises SystemExit on wrong arguments."""
    options = parser().parse_args(arguments)
    # What is made of users' text is as private as the text.
    before = os.umask(0o077) if options.traffic else None
    try:
        return _run(options)
    finally:
        if before is not None:
            os.umask(before)


def _run(options: argparse.Namespace) -> int:
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        spent = gather(options, Place(options.out))
        if options.traffic:
            spent += gather_logged(options, Place(options.out / FOLDER))
        if options.gather_only:
            return 0
        fit = head.fit if options.kind == "head" else table.fit
        card = fit(options, spent)
    except (GatherError, StatesError, CheckpointError, TrafficError, ForcedError) as error:
        print(error)
        return 1
    (options.out / f"{options.kind}.card.json").write_text(json.dumps(card, indent=1) + "\n")
    print(json.dumps(card, indent=1))
    return 0
