"""How many drafts pay: a cost model of steps learnt online, acceptance per sequence, and their product.

The goal is tokens per second of the whole step (goodput). With B sequences, r draft rows and p the chance that each
draft row becomes output, a step yields B + Σp tokens in T(B + r) milliseconds. Rows are added in order of p, and the
number of rows with the best yield over time is taken: none, if none pays. Whether a draft token was right is learnt
for every token that the draft service ever gave, also for those that were not run, so nothing has to be wasted on
trying: under keep-while-equal the output does not depend on the drafts.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

# Rows are drafted only if the step's yield over time grows by this factor: the estimates are noisy.
_MARGIN = 1.02
# A measured step time moves the estimate by this share; the first ones by more.
_COST_RATE = 0.03
# The pace takes this share of what a step was slower or faster (in logarithms) if its row count is known well: it was
# measured a few times, and just now.
_PACE_RATE = 0.2
_FRESH = 4
_PACE_MOST = 2.0
_SETTLED = 3
# Outliers (another process had the core) count as at most this multiple of the estimate.
_OUTLIER = 3.0
_FIRST_OUTLIER = 1.5
# Trust in an estimate shrinks with this factor per step that did not renew it.
_STALE = 0.99
# What one more row is believed to cost before anything was measured, as a share of a step of one row.
_PRIOR_SLOPE = 0.08
# Acceptance forgets with this factor per observed draft.
_DECAY = 0.97
_PRIOR_WEIGHT = 3.0
# Trials of drafts that do not seem to pay: steps between them at first and at last, rows, and the largest batch.
_FIRST_TRIAL = 32
_PLAIN_AGE = 250
_LAST_TRIAL = 2_048
_TRIAL_ROWS = 3
_TRIAL_BATCH = 8


def _bucket(rows: int) -> int:
    """Row counts that share one estimate: exact up to 16, then by 4, from 64 on by 16."""
    step = 1 if rows <= 16 else 4 if rows <= 64 else 16
    return rows // step * step


class CostModel:
    """Milliseconds of a decode step as a function of its sampled rows.

    A time is a pace times a cost by rows. The pace follows the machine within a few steps, whatever is run, so that row
    counts which were measured while others had the core stay comparable with those that are measured now.
    """

    def __init__(self) -> None:
        self._pace = 1.0
        self._rows: list[int] = []
        self._time: dict[int, float] = {}
        self._seen: dict[int, int] = {}
        # Number of the last step that measured a row count: what was not seen for long yields faster.
        self._last: dict[int, int] = {}
        self._steps = 0
        # Predictions since the last measurement: a step asks for the same few again and again.
        self._predicted: dict[int, float] = {}

    def learn(self, rows: int, step_ms: float) -> None:
        """A step without prefill took so long."""
        if rows < 1 or step_ms <= 0:
            return
        rows = _bucket(rows)
        self._steps += 1
        self._predicted.clear()
        age = self._steps - self._last.get(rows, self._steps)
        self._last[rows] = self._steps
        known = self._time.get(rows)
        if known is None:
            # A first measurement far above what its neighbours say is more likely a bad moment than the truth; if it
            # is the truth, the next ones raise it.
            likely = _FIRST_OUTLIER * self.predict(rows) if self._rows else step_ms
            bisect.insort(self._rows, rows)
            self._time[rows] = min(step_ms, likely) / self._pace
            self._seen[rows] = 1
            return
        self._seen[rows] += 1
        early = 1 / self._seen[rows] if self._seen[rows] <= _SETTLED else 0.0
        rate = max(_COST_RATE, early, 1 - _STALE**age)
        # Only upwards: the first measurement may itself be the outlier.
        now = min(step_ms / self._pace, _OUTLIER * known)
        self._time[rows] = known + rate * (now - known)
        if self._seen[rows] > _SETTLED and age <= _FRESH:
            self._pace *= min(now / known, _PACE_MOST) ** _PACE_RATE

    def age(self, rows: int) -> int:
        """Steps since this row count was measured; all steps if never."""
        return self._steps - self._last.get(_bucket(rows), 0)

    def predict(self, rows: int) -> float:
        """Milliseconds: linear between measured row counts, beyond them with the mean slope; 1.0 if all is unknown.

        Rows never cost more than what was measured since for more of them: such a time was measured in a bad moment.
        """
        found = self._predicted.get(rows)
        if found is None:
            found = self._predicted[rows] = self._interpolated(rows)
        return found

    def _interpolated(self, rows: int) -> float:
        if not self._rows:
            return 1.0 + _PRIOR_SLOPE * (rows - 1)
        place = bisect.bisect_left(self._rows, rows)
        if place == len(self._rows):
            low = self._rows[-1]
            return self._pace * (self._time[low] + self._slope() * (rows - low))
        high, above = self._rows[place], self._least_from(place)
        if high == rows:
            return self._pace * above
        if place == 0:
            # Hopeful: a smaller step that was never tried looks cheap until it is tried.
            return self._pace * above * rows / high
        low = self._rows[place - 1]
        below = min(self._time[low], above)
        return self._pace * (below + (rows - low) / (high - low) * (above - below))

    def _least_from(self, place: int) -> float:
        """The time of this row count, or the least that was measured later for more rows."""
        since = self._last[self._rows[place]]
        return min(self._time[rows] for rows in self._rows[place:] if self._last[rows] >= since)

    def _slope(self) -> float:
        """Milliseconds per further row: over the whole measured range, never negative."""
        low, high = self._rows[0], self._rows[-1]
        if low == high:
            return self._time[low] * _PRIOR_SLOPE / (1 + _PRIOR_SLOPE * (low - 1))
        return max(0.0, (self._time[high] - self._time[low]) / (high - low))


@dataclass(slots=True)
class Acceptance:
    """Chance that the first draft is right, and that the next one is when those before it were."""

    first_hits: float = 0.0
    first_tries: float = 0.0
    # Sum of the confidences that came with the first drafts: hits over this sum tells how far to trust them.
    first_claimed: float = 0.0
    next_hits: float = 0.0
    next_tries: float = 0.0

    def learn(self, first: bool, agreed: int, failed: bool, claimed: float = 0.0) -> None:
        """`agreed` drafts in a row were right, then (if `failed`) one was wrong. first: the row began with draft 0,
        for which the proposer claimed this confidence (0: none)."""
        if first and (agreed or failed):
            self.first_hits = self.first_hits * _DECAY + (agreed > 0)
            self.first_tries = self.first_tries * _DECAY + 1
            self.first_claimed = self.first_claimed * _DECAY + (claimed or self.first(0.5))
            if not agreed:
                return
            agreed -= 1
        if agreed or failed:
            self.next_hits = self.next_hits * _DECAY + agreed
            self.next_tries = self.next_tries * _DECAY + agreed + failed

    def first(self, prior: float) -> float:
        return (self.first_hits + _PRIOR_WEIGHT * prior) / (self.first_tries + _PRIOR_WEIGHT)

    def first_given(self, claimed: float) -> float:
        """Chance of a first draft with this confidence: what was claimed, corrected by how claims have fared."""
        trust = (self.first_hits + 0.5 * _PRIOR_WEIGHT) / (self.first_claimed + 0.5 * _PRIOR_WEIGHT)
        return min(0.98, claimed * trust)

    def following(self, prior: float) -> float:
        return (self.next_hits + _PRIOR_WEIGHT * prior) / (self.next_tries + _PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class Offer:
    """Drafts at hand for one sequence: how many could run, and the chance of each given those before it."""

    sequence_id: int
    chances: tuple[float, ...]


def _ranked(offers: Sequence[Offer]) -> list[tuple[float, int, int]]:
    """(minus chance to be reached and right, position, sequence id) of all offered drafts, best first.

    The chance falls along a sequence, so whatever prefix of this list is run is a prefix of every draft.
    """
    rows = []
    for offer in offers:
        reach = 1.0
        for position, chance in enumerate(offer.chances):
            reach *= chance
            rows.append((-reach, position, offer.sequence_id))
    rows.sort()
    return rows


@dataclass(slots=True)
class LengthControl:
    """Chooses draft lengths for a step, and tells whether seeking drafts can pay at all."""

    cost: CostModel = field(default_factory=CostModel)
    # Steps between two trials of drafts that do not seem to pay, and steps since the last one. A trial corrects a cost
    # that was measured in a bad moment; it becomes rarer each time that it changes nothing.
    trial_interval: int = _FIRST_TRIAL
    since_trial: int = 0
    trying: bool = False

    def learn(self, rows: int, step_ms: float) -> None:
        """A step without prefill took so long. A trial that was cheaper than believed is soon followed by another."""
        if self.trying and step_ms < 0.9 * self.cost.predict(rows):
            self.trial_interval = _FIRST_TRIAL
        self.trying = False
        self.cost.learn(rows, step_ms)

    def seek(self, batch: int, chance: float) -> bool:
        """Whether to look for drafts at all, if they are at best right with this chance. False costs nothing."""
        if self.can_pay(batch, chance):
            return True
        if batch > _TRIAL_BATCH:
            return False
        self.since_trial += 1
        return self.since_trial >= self.trial_interval

    def allocate(self, batch: int, offers: Sequence[Offer]) -> dict[int, int]:
        """Drafts to run, by sequence id (absent: none). batch: sequences that decode in this step."""
        rows = _ranked(offers)
        count = self._best_count(batch, rows)
        if count:
            self.since_trial, self.trial_interval = 0, _FIRST_TRIAL
            if self.cost.age(batch) > _PLAIN_AGE:
                # What drafts are compared with must stay known: one step without them measures it.
                return {}
        elif rows and batch <= _TRIAL_BATCH and -rows[0][0] >= 0.5:
            count = self._trial(len(rows))
        lengths: dict[int, int] = {}
        for _, _, identity in rows[:count]:
            lengths[identity] = lengths.get(identity, 0) + 1
        return lengths

    def force(self, batch: int) -> None:
        """The coming step runs drafts that may not pay, to measure it."""
        self.trying = batch <= _TRIAL_BATCH

    def _trial(self, available: int) -> int:
        """Rows to run although they do not seem to pay: mostly none."""
        self.since_trial += 1
        if self.since_trial < self.trial_interval:
            return 0
        self.since_trial = 0
        self.trial_interval = min(2 * self.trial_interval, _LAST_TRIAL)
        self.trying = True
        return min(_TRIAL_ROWS, available)

    def _best_count(self, batch: int, rows: list[tuple[float, int, int]]) -> int:
        """How many of the ranked rows give the best yield over time."""
        best = batch / self.cost.predict(batch) * _MARGIN
        best_count, gained = 0, 0.0
        for count, (reach, _, _) in enumerate(rows, start=1):
            gained -= reach
            value = (batch + gained) / self.cost.predict(batch + count)
            if value > best:
                best, best_count = value, count
        return best_count

    def can_pay(self, batch: int, chance: float) -> bool:
        """Whether one sequence's drafts, each right with this chance, could speed up a step of `batch` sequences."""
        return self._best_count(batch, _ranked([Offer(0, (chance,) * 8)])) > 0

    def token_ms(self, batch: int) -> float:
        """Milliseconds that one token of one sequence takes without drafts, in a batch of this size."""
        return self.cost.predict(batch) / max(1, batch)


@dataclass(slots=True)
class AskPolicy:
    """When to ask the draft for one sequence, and what asking has brought.

    `gain` is a moving average of accepted drafts per question. As long as that is worth less time than a question
    costs, the sequence asks only every 2, 4, … steps; a fruitful question brings it back at once.
    """

    gain: float = 1.0
    questions: int = 0
    interval: int = 1
    skipped: int = 0

    MAX_INTERVAL = 64
    # Drafts of one question count up to this many: a long copy ends at an unknown place.
    MAX_GAIN = 8.0

    def skip(self) -> None:
        """A step came in which the sequence has no drafts."""
        self.skipped += 1

    @property
    def ripe(self) -> bool:
        """It is time to ask."""
        return self.skipped >= self.interval

    def asked(self) -> None:
        self.skipped = 0
        self.questions += 1

    def learn(self, used: float, pays: bool) -> None:
        """The last question brought `used` accepted drafts (beyond what the head would have); pays: the average is
        worth the cost of asking."""
        rate = max(0.15, 1 / (1 + self.questions))
        self.gain += rate * (min(used, self.MAX_GAIN) - self.gain)
        if used > 0 or pays:
            self.interval = 1
        else:
            self.interval = min(2 * self.interval, self.MAX_INTERVAL)
