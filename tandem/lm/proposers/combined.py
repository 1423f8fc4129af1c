"""Several proposers for one sequence: each guess is rated by how such guesses have fared, and the best one is given."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.lm.proposers.base import NOTHING, DraftSequence, Guess, Proposer

# Matches this long and longer share one rating.
_LONGEST_MATCH = 12
# Ratings forget with this factor per observation, so that about the last 200 count.
_DECAY = 0.995
_PRIOR_WEIGHT = 2.0
# Confidences are told apart in so many steps.
_CLAIMS = 8
# Length that a guess with distributions is taken to have.
_DRAWN_LENGTH = 3


@dataclass(slots=True)
class _Rating:
    """How often the first id was right, and how often the next one was when those before it were."""

    first_hits: float = 0.0
    first_tries: float = 0.0
    next_hits: float = 0.0
    next_tries: float = 0.0

    def learn(self, agreed: int, compared: int) -> None:
        """`agreed` of `compared` (≥ 1) ids were right."""
        self.first_tries = self.first_tries * _DECAY + 1
        self.first_hits = self.first_hits * _DECAY + (agreed > 0)
        if agreed > 0 and compared > 1:
            self.next_hits = self.next_hits * _DECAY + (agreed - 1)
            self.next_tries = self.next_tries * _DECAY + (agreed - 1) + (agreed < compared)

    def first(self, prior: float) -> float:
        return (self.first_hits + _PRIOR_WEIGHT * prior) / (self.first_tries + _PRIOR_WEIGHT)

    def following(self) -> float:
        return (self.next_hits + _PRIOR_WEIGHT * 0.7) / (self.next_tries + _PRIOR_WEIGHT)


def _prior(match: int) -> float:
    """What to believe of a copy with this much agreeing context before anything was observed."""
    return 1.0 - 1.0 / (1.0 + 0.35 * match) if match else 0.5


class CombinedProposer:
    """Asks every allowed proposer and gives the guess with most expected right ids. Learns from what was committed."""

    name = "combined"

    def __init__(self, proposers: list[Proposer]) -> None:
        """Raises ValueError if there is none or two have one name."""
        names = [proposer.name for proposer in proposers]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"proposers are {names}, but at least one is needed and names are unique")
        self.proposers = proposers
        # By proposer, agreeing context and claimed confidence: a claim is worth what such claims have been.
        self._ratings: dict[tuple[str, int, int], _Rating] = {}

    def start(self, sequence: DraftSequence) -> None:
        sequence.state[self.name] = []
        for proposer in self.proposers:
            if sequence.allows(proposer.name):
                proposer.start(sequence)

    def extend(self, sequence: DraftSequence, start: int) -> None:
        self._learn(sequence)
        for proposer in self.proposers:
            if sequence.allows(proposer.name):
                proposer.extend(sequence, start)

    def _learn(self, sequence: DraftSequence) -> None:
        """Compares the last guesses with what came."""
        for base, guess in sequence.state[self.name]:
            came = sequence.tokens[base : base + len(guess.ids)]
            if not came:
                continue
            agreed = 0
            for mine, theirs in zip(guess.ids, came, strict=False):
                if mine != theirs:
                    break
                agreed += 1
            self._rating(guess).learn(agreed, len(came))
        sequence.state[self.name] = []

    def _rating(self, guess: Guess) -> _Rating:
        key = (guess.proposer, min(guess.match, _LONGEST_MATCH), int(guess.confidence * _CLAIMS))
        return self._ratings.setdefault(key, _Rating())

    def propose(self, wants: list[tuple[DraftSequence, int]]) -> list[Guess]:
        best: list[tuple[float, Guess]] = [(0.0, NOTHING)] * len(wants)
        for proposer in self.proposers:
            rows = [row for row, (sequence, _) in enumerate(wants) if sequence.allows(proposer.name)]
            guesses = proposer.propose([wants[row] for row in rows]) if rows else []
            for row, guess in zip(rows, guesses, strict=True):
                if guess.ids:
                    sequence = wants[row][0]
                    sequence.state[self.name].append((len(sequence.tokens), guess))
                    best[row] = max(best[row], self._rate(guess), key=lambda item: item[0])
        return [guess for _, guess in best]

    def _rate(self, guess: Guess) -> tuple[float, Guess]:
        """Expected number of right ids, and the guess with its rated confidence."""
        rating = self._rating(guess)
        first = rating.first(guess.confidence or _prior(guess.match))
        following = rating.following()
        # A drawn guess must not be chosen by what was drawn, and its length may depend on that.
        count = len(guess.ids) if guess.distributions is None else _DRAWN_LENGTH
        run = (1 - following**count) / (1 - following) if following < 0.999 else float(count)
        return first * run, Guess(guess.ids, guess.proposer, first, guess.match, guess.distributions)

    def finish(self, sequence: DraftSequence, completed: bool) -> None:
        sequence.state.pop(self.name, None)
        for proposer in self.proposers:
            if sequence.allows(proposer.name):
                proposer.finish(sequence, completed)

    def close(self) -> None:
        for proposer in self.proposers:
            proposer.close()
