"""An engine process over the fake model, for tests of signals. Arguments: listen, step_s, grace_s, stall_limit_s."""

from __future__ import annotations

import functools
import sys
import time

from engine_service import main
from engine_service.engine import Engine
from engine_service.settings import EngineSettings
from engine_service.speculation import NullSpeculation
from tandem.lm.types import Slice, SliceOutput
from tests.engine_service.fakes import FakeRunner, byte_tokenizer


class SlowRunner(FakeRunner):
    """Takes its time, deaf to everything, as native code is."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def execute(self, slices: list[Slice]) -> list[SliceOutput]:
        time.sleep(self.seconds)
        return super().execute(slices)


if __name__ == "__main__":
    options = EngineSettings(listen=sys.argv[1], grace=float(sys.argv[3]), stall_limit=float(sys.argv[4]))
    runner = SlowRunner(float(sys.argv[2]))
    load = functools.partial(Engine, options, runner, byte_tokenizer(), NullSpeculation(), ("fake",))
    main.Process = functools.partial(main.Process, load=lambda _settings: load())  # type: ignore[misc, assignment]
    sys.exit(main.run(options))
