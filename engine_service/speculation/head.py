"""The head in the engine: which sequences it drafts for, how far, and how often it has been right.

It costs time on the step's critical path, so its drafts are bought one token at a time: another one is drafted while
the chance that it becomes output, times what a token costs without drafts, exceeds its own cost and that of its row.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine_service.speculation.control import Acceptance, CostModel
from engine_service.speculation.stats import HeadStats
from tandem.lm.proposers.head import CLAIMS, HeadProposer, HeadRun, Pursuit
from tandem.lm.proposers.head_file import HeadError, load_head
from tandem.lm.types import Runner, Sequence

log = logging.getLogger(__name__)

NAME = HeadProposer.name
# Heads that come with the draft service, beside this package, each with its card.
SHIPPED = Path(__file__).parents[2] / "draft_service" / "heads"
# A head drafts only if tokens per second grow by this factor: the estimates are noisy.
_MARGIN = 1.02
# Most drafts of one sequence in a step.
MAX_HEAD_DRAFTS = 8
# What one token of one row is believed to take before it was measured, milliseconds.
_PRIOR_MS = 0.3
_COST_RATE = 0.05
# A measurement counts as at most this multiple of what is known.
_OUTLIER = 2.0
# What is believed of the first draft and of the following ones before any was seen.
_PRIOR_FIRST, _PRIOR_NEXT = 0.55, 0.5
# Ratings forget so that about the last 200 of a kind count.
_DECAY = 0.995
_PRIOR_WEIGHT = 4.0
# Steps between two trials of a head that does not seem to pay, at first and at last; drafts per trial.
_FIRST_TRIAL, _LAST_TRIAL = 32, 1_024
_TRIAL_DRAFTS = 2
# Steps of one trial: a single one proves little.
_TRIAL_STEPS = 4
_TRIAL_BATCH = 8


@dataclass(slots=True)
class HeadState:
    """What the head holds of one sequence: one hidden state, and its last drafts until they are compared."""

    hidden: np.ndarray | None = None
    # Committed tokens that the hidden state belongs to.
    length: int = -1
    # Drafts for positions from `base` on, their claims, and whether they were drawn for rejection.
    base: int = -1
    ids: tuple[int, ...] = ()
    claims: tuple[float, ...] = ()
    drawn: bool = False
    acceptance: Acceptance = field(default_factory=Acceptance)


class Calibration:
    """How often drafts with such a claim were right, given those before: greedy and sampled, first and later apart."""

    def __init__(self) -> None:
        # By sampled or greedy, first or later draft, step of the claim.
        self._hits = np.zeros((2, 2, CLAIMS))
        self._tries = np.zeros((2, 2, CLAIMS))
        self._trust: dict[bool, np.ndarray] = {}

    def learn(self, greedy: bool, position: int, claim: float, right: bool) -> None:
        at = int(greedy), min(position, 1), min(int(claim * CLAIMS), CLAIMS - 1)
        self._hits[at] = self._hits[at] * _DECAY + right
        self._tries[at] = self._tries[at] * _DECAY + 1
        self._trust.clear()

    def trust(self, greedy: bool) -> np.ndarray:
        """fp32 [2, CLAIMS, 2], of the first draft and of later ones: a claim's chance is [0] + [1] · claim."""
        if greedy in self._trust:
            return self._trust[greedy]
        # With shared noise a draft is right more often than its probability says.
        base, slope = (0.0, 1.0) if greedy else (0.3, 0.6)
        hits, tries = self._hits[int(greedy)], self._tries[int(greedy)] + _PRIOR_WEIGHT
        table = ((hits + _PRIOR_WEIGHT * base) / tries, _PRIOR_WEIGHT * slope / tries)
        self._trust[greedy] = np.ascontiguousarray(np.stack(table, axis=-1), np.float32)
        return self._trust[greedy]

    def chance(self, greedy: bool, position: int, claim: float) -> float:
        first, slope = self.trust(greedy)[min(position, 1), min(int(claim * CLAIMS), CLAIMS - 1)]
        return float(first + slope * claim)


class HeadSource:
    """Drafts of the head for the step loop. All calls come from its thread."""

    def __init__(self, proposer: HeadProposer, stats: HeadStats, max_drafts: int = MAX_HEAD_DRAFTS) -> None:
        self._proposer = proposer
        self._most = min(max_drafts, MAX_HEAD_DRAFTS)
        self.stats = stats
        self.calibration = Calibration()
        # Over all sequences: greedy, sampled.
        self._prior = {True: Acceptance(), False: Acceptance()}
        # Milliseconds by rows: of the first drafted token, whose weights come from memory, and of a later one.
        self._cost: dict[int, float] = {}
        self._next_cost: dict[int, float] = {}
        self.trial_interval = _FIRST_TRIAL
        self.since_trial = 0
        # Steps of a trial that are left; in a trial drafts are run whether they seem to pay or not.
        self._trial_left = 0
        self.trying = False
        # Time that drafting took since it was last asked for, milliseconds.
        self._spent_ms = 0.0
        # Depths of this step by sequence, batch and length: they are asked for several times.
        self._depths: dict[tuple[int, int, int], tuple[int, float, float]] = {}

    def take_spent_ms(self) -> float:
        """Also begins a new step."""
        self._depths.clear()
        spent, self._spent_ms = self._spent_ms, 0.0
        return spent

    def token_ms(self, rows: int) -> float:
        """Milliseconds that the first token takes for so many rows at once."""
        return _looked_up(self._cost, rows)

    def next_ms(self, rows: int) -> float:
        """Milliseconds that a later token takes for so many rows at once."""
        return min(self.token_ms(rows), _looked_up(self._next_cost, rows))

    def draft_ms(self, depth: int) -> float:
        """Milliseconds of a chain of one row."""
        return self.token_ms(1) + (depth - 1) * self.next_ms(1) if depth else 0.0

    # What came of it.

    def keep(self, state: HeadState, sequence: Sequence, hidden: np.ndarray) -> None:
        """A step committed tokens; hidden is the state whose logits gave the last one."""
        state.hidden, state.length = hidden, len(sequence.token_ids)

    def align(self, state: HeadState, sequence: Sequence, verified: int) -> None:
        """Compares the last drafts with what was committed, and learns. verified: how many of them were run."""
        if state.base < 0 or not state.ids:
            return
        came = sequence.token_ids[state.base : state.base + len(state.ids)]
        if not came:
            return
        # What was drawn for rejection and not verified has nothing to be compared with: the target drew another way.
        count = min(len(came), verified) if state.drawn else len(came)
        greedy, agreed = sequence.params.greedy, 0
        while agreed < count and state.ids[agreed] == came[agreed]:
            agreed += 1
        failed = agreed < count
        for position, claim in enumerate(state.claims[: agreed + failed]):
            if not state.drawn:
                self.calibration.learn(greedy, position, claim, position < agreed)
        for acceptance in (state.acceptance, self._prior[greedy]):
            acceptance.learn(True, agreed, failed)
        state.base, state.ids, state.claims = -1, (), ()

    # What to expect.

    def _expected(self, state: HeadState, greedy: bool) -> tuple[float, float]:
        """Chance of the first draft, and of a later one given those before."""
        prior = self._prior[greedy]
        first = state.acceptance.first(prior.first(_PRIOR_FIRST))
        return first, state.acceptance.following(prior.following(_PRIOR_NEXT))

    def yields(self, state: HeadState, sequence: Sequence, batch: int, cost: CostModel) -> float:
        """Drafts of the head that should become output in the coming step, less what drafting costs, in tokens."""
        if not self.ready(state, sequence):
            return 0.0
        depth, gained, _ = self._depth(state, sequence, batch, cost)
        return max(0.0, gained - self.draft_ms(depth) / _token_ms(cost, batch))

    def ready(self, state: HeadState, sequence: Sequence) -> bool:
        """Whether the hidden state at hand is that of the last token."""
        return state.hidden is not None and state.length == len(sequence.token_ids)

    def _depth(self, state: HeadState, sequence: Sequence, batch: int, cost: CostModel) -> tuple[int, float, float]:
        """Drafts that give most tokens per second on average, how many of them should be right, and milliseconds per
        token then."""
        key = sequence.id, batch, len(sequence.token_ids)
        if key not in self._depths:
            self._depths[key] = self._best_depth(*self._expected(state, sequence.params.greedy), batch, cost)
        return self._depths[key]

    def _best_depth(self, first: float, following: float, batch: int, cost: CostModel) -> tuple[int, float, float]:
        plain, drafting, more = cost.predict(batch), self.token_ms(1), self.next_ms(1)
        alone = plain / max(1, batch)
        best, best_ms, best_gain = 0, alone / _MARGIN, 0.0
        reach, gained = first, 0.0
        for depth in range(1, self._most + 1):
            gained += reach
            per_token = (alone + drafting + cost.predict(batch + depth) - plain) / (1 + gained)
            if per_token < best_ms:
                best, best_ms, best_gain = depth, per_token, gained
            reach *= following
            drafting += more
        return best, best_gain, best_ms

    def plan(self, wishes: list[tuple[HeadState, Sequence, int]], batch: int, cost: CostModel) -> list[int]:
        """Most drafts per wish (state, sequence, room): 0 where the head does not pay, but for a rare trial."""
        depths = []
        self.trying = False
        for state, sequence, room in wishes:
            depth, _, _ = self._depth(state, sequence, batch, cost)
            # Where it pays on average, a sure chain may grow beyond the average length.
            depths.append(min(room, self._most, 2 * depth) if self.ready(state, sequence) else 0)
        if any(depths):
            self.since_trial, self.trial_interval, self._trial_left = 0, _FIRST_TRIAL, 0
            return depths
        able = [row for row, (state, sequence, room) in enumerate(wishes) if room and self.ready(state, sequence)]
        if able and batch <= _TRIAL_BATCH:
            self.since_trial += 1
            if self.since_trial >= self.trial_interval:
                self.since_trial, self.trial_interval = 0, min(2 * self.trial_interval, _LAST_TRIAL)
                self._trial_left = _TRIAL_STEPS
            if self._trial_left:
                self._trial_left -= 1
                self.trying = True
                depths[able[0]] = min(_TRIAL_DRAFTS, wishes[able[0]][2])
        return depths

    def draft(
        self,
        wishes: list[tuple[HeadState, Sequence, int]],
        batch: int,
        cost: CostModel,
        rejection: list[bool],
    ) -> list[HeadRun]:
        """Drafts for wishes (state, sequence, most), kept to be compared. rejection: which are drawn for it."""
        runs = []
        for (state, sequence, most), drawn in zip(wishes, rejection, strict=True):
            assert state.hidden is not None
            depth, _, worth = self._depth(state, sequence, batch, cost)
            if drawn:
                # How far a drawn chain goes may not depend on what was drawn, or the output would lean.
                runs.append(HeadRun(sequence, state.hidden, min(most, max(1, depth)), True))
            else:
                # In a trial of a head that does not pay there is nothing to weigh.
                pursuit = self._pursuit(sequence, most, len(wishes), batch, cost, worth) if depth else None
                runs.append(HeadRun(sequence, state.hidden, most, pursuit=pursuit))
        began = time.perf_counter()
        self._proposer.draft(runs)
        self._note_cost(runs, (time.perf_counter() - began) * 1e3)
        for (state, sequence, _), run in zip(wishes, runs, strict=True):
            state.base, state.ids, state.claims = len(sequence.token_ids), tuple(run.ids), tuple(run.claims)
            state.drawn = run.rejection
        return runs

    def _pursuit(self, sequence: Sequence, most: int, runs: int, batch: int, cost: CostModel, worth: float) -> Pursuit:
        """Another draft is made while the chance that it becomes output, times what a token is worth in milliseconds,
        exceeds what drafting and verifying it costs."""
        greedy = sequence.params.greedy
        following = self._prior[greedy].following(_PRIOR_NEXT)
        times = [cost.predict(batch + runs * count) for count in range(1, most + 2)]
        scale, drafting = 1.0 / (runs * following * worth), self.next_ms(runs)
        least = [scale * (drafting + max(0.0, after - before)) for before, after in itertools.pairwise(times)]
        return Pursuit(self.calibration.trust(greedy), np.array(least, np.float32))

    def chances(self, run: HeadRun, state: HeadState | None = None) -> tuple[float, ...]:
        """Chance of each draft given those before it."""
        greedy = run.sequence.params.greedy
        if run.rejection and state is not None:
            first, following = self._expected(state, greedy)
            return (first,) + (following,) * (len(run.ids) - 1)
        trust, steps = self.calibration.trust(greedy), [min(int(claim * CLAIMS), CLAIMS - 1) for claim in run.claims]
        found = [trust[min(at, 1), step] for at, step in enumerate(steps)]
        return tuple(float(part[0] + part[1] * claim) for part, claim in zip(found, run.claims, strict=True))

    def _note_cost(self, runs: list[HeadRun], took_ms: float) -> None:
        self._spent_ms += took_ms
        steps = max((len(run.ids) for run in runs), default=0)
        self.stats.calls += 1
        self.stats.drafted += sum(len(run.ids) for run in runs)
        self.stats.spent_us += took_ms * 1e3
        if not steps:
            return
        rows = len(runs)
        costs, measured = self._cost, took_ms
        if steps > 1:
            costs, measured = self._next_cost, max(0.0, took_ms - self.token_ms(rows)) / (steps - 1)
        known = costs.get(rows)
        if known is None:
            costs[rows] = min(measured, _OUTLIER * _looked_up(costs, rows))
        else:
            costs[rows] = known + _COST_RATE * (min(measured, _OUTLIER * known + 0.01) - known)


def _looked_up(costs: dict[int, float], rows: int) -> float:
    """Milliseconds for so many rows: measured, or of the nearest row count."""
    if rows in costs:
        return costs[rows]
    nearest = min(costs, key=lambda known: abs(known - rows), default=0)
    return costs[nearest] * (rows / nearest if rows > nearest else 1.0) if nearest else _PRIOR_MS * rows**0.5


def _token_ms(cost: CostModel, batch: int) -> float:
    """What a token costs without drafts, in milliseconds of the whole step."""
    return cost.predict(batch) / max(1, batch)


def load(setting: str, runner: Runner, model: str = "") -> HeadProposer | None:
    """The head that the engine's setting names: "none", "auto" (a shipped one that was trained for this very model, if
    there is one), or a file.

    Raises:
        HeadError: the file cannot be used with this model; says why. "auto" never raises.
    """
    if setting == "none":
        return None
    if setting != "auto":
        path = Path(setting)
        try:
            return HeadProposer(load_head(path), runner)
        except HeadError as error:
            text = str(error)
            raise HeadError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    reasons = []
    for path in sorted(SHIPPED.glob("*.head.safetensors")):
        try:
            proposer = HeadProposer(load_head(path), runner)
        except HeadError as error:
            reasons.append(f"{path.name}: {error}")
        else:
            log.info("drafting with the head %s", path.name)
            return proposer
    log.info("no draft head for this model: %s", "; ".join(reasons) or "none is shipped")
    return None
