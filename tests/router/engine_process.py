"""A real engine over a fake model, with a real draft service beside it: python -m tests.router.engine_process.

Scheduler, KV pool, speculation and service are the product's; only the forward pass is made up and takes `--step-s`.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time

from engine_service import main
from engine_service.engine import Engine
from engine_service.settings import EngineSettings
from engine_service.speculation.client import DraftClient
from engine_service.speculation.controller import DraftSpeculation, SpeculationOptions
from tandem.lm.types import Slice, SliceOutput
from tests.engine_service.fakes import FakeRunner, byte_tokenizer


class SlowRunner(FakeRunner):
    """A step costs the same whatever it computes, so that drafts are always worth asking for."""

    def __init__(self, seconds: float) -> None:
        super().__init__(num_blocks=4096, block_size=16, max_model_len=20_000)
        self.seconds = seconds

    def execute(self, slices: list[Slice]) -> list[SliceOutput]:
        time.sleep(self.seconds)
        return super().execute(slices)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--max-num-seqs", type=int, default=2)
    parser.add_argument("--max-waiting", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    options = _options()
    settings = EngineSettings(
        listen=options.listen,
        max_num_seqs=options.max_num_seqs,
        max_waiting=options.max_waiting,
        max_num_batched_tokens=64,
        prefill_chunk=64,
        log_level="warning",
    )
    speculation = DraftSpeculation(DraftClient(options.draft), SpeculationOptions(timeout_ms=50.0, vocab_size=258))
    engine = functools.partial(Engine, settings, SlowRunner(options.step_s), byte_tokenizer(), speculation, ("fake",))
    main.Process = functools.partial(main.Process, load=lambda _settings: engine())  # type: ignore[misc, assignment]
    sys.exit(main.run(settings))
