"""What crosses between the event loop and the step loop: jobs go in, one report per step comes out."""

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
    """What a step did for one request. `error` ends it."""

    request: Request
    updates: list[ChoiceUpdate] = field(default_factory=list)
    prompt_scores: list[TokenScore] | None = None
    error: TandemError | None = None


@dataclass(slots=True)
class StepReport:
    """What a step did for all requests and to the prefix cache."""

    jobs: list[JobReport]
    changes: list[KvChange]
