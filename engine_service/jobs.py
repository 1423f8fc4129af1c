"""What crosses between the event loop and the step loop: jobs go in, reports of steps come out."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_service.grammar import GrammarMatcher
from engine_service.output import ChoiceUpdate
from engine_service.requests import Choice, Request
from engine_service.text import StopTracker
from tandem.errors import TandemError
from tandem.lm.block_pool import KvChange
from tandem.lm.types import TokenScore


@dataclass(slots=True, eq=False)
class Job:
    """A request with what the loop needs to run it: per unfinished choice a stop tracker and perhaps a grammar."""

    request: Request
    trackers: dict[int, StopTracker]
    matchers: dict[int, GrammarMatcher] = field(default_factory=dict)
    prompt_scores: list[TokenScore] = field(default_factory=list)

    def matcher(self, choice: Choice) -> GrammarMatcher | None:
        return self.matchers.get(choice.sequence.choice)


@dataclass(slots=True)
class JobReport:
    """What one or a few steps did for one request. `error` ends it."""

    request: Request
    updates: list[ChoiceUpdate] = field(default_factory=list)
    prompt_scores: list[TokenScore] | None = None
    error: TandemError | None = None

    # When steps gave it tokens, time.monotonic.
    times: list[float] = field(default_factory=list)

    def add(self, update: ChoiceUpdate, at: float) -> None:
        """Notes what a choice got; what it got before and nobody has read yet becomes one update with it."""
        if not self.times or self.times[-1] != at:
            self.times.append(at)
        for index, earlier in enumerate(self.updates):
            if earlier.choice == update.choice:
                self.updates[index] = earlier.then(update)
                return
        self.updates.append(update)


@dataclass(slots=True)
class StepReport:
    """What one or a few steps did for all requests and to the prefix cache."""

    jobs: list[JobReport]
    changes: list[KvChange]
