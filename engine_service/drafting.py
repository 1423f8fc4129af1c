"""Drafts on the way from speculation to the step and back: asked for, cut to what may follow, and accounted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engine_service.grammar import GrammarMatcher
from engine_service.plan import Entry
from engine_service.requests import Choice
from engine_service.speculation import MAX_DRAFTS, Draft, NullSpeculation, SpecCandidate, SpeculationController
from tandem.lm.types import Slice


class Drafting:
    """Speculation as the step loop uses it. It tells of each sequence once, before anything else is said of it."""

    def __init__(
        self,
        speculation: SpeculationController,
        vocab_size: int,
        matcher: Callable[[Choice], GrammarMatcher | None],
    ) -> None:
        self._speculation = speculation
        # Whether there is anybody to ask for drafts.
        self.on = type(speculation) is not NullSpeculation
        self._vocab_size = vocab_size
        self._matcher = matcher
        self._known: set[int] = set()
        # The drafts of the coming step, by sequence id.
        self._drafts: dict[int, Draft] = {}

    def announce(self, choice: Choice) -> None:
        if choice.sequence.id not in self._known:
            self._known.add(choice.sequence.id)
            self._speculation.started(choice.sequence, choice.request.salt.decode("utf-8", "replace"))

    def forget(self, choice: Choice) -> bool:
        """Ends a sequence. False if it had never been announced."""
        sequence_id = choice.sequence.id
        if sequence_id not in self._known:
            return False
        self._known.remove(sequence_id)
        self._speculation.finished(sequence_id)
        return True

    def ask(self, decoding: list[Choice]) -> dict[int, tuple[int, ...]]:
        """Drafts by sequence id for choices that will decode."""
        self._drafts = {}
        if not decoding:
            return {}
        for choice in decoding:
            self.announce(choice)
        candidates = [
            SpecCandidate(
                choice.sequence,
                max(0, min(MAX_DRAFTS, choice.max_output - choice.sequence.output_len - 1)),
                self._matcher(choice) is not None,
            )
            for choice in decoding
        ]
        drafts = self._speculation.propose(candidates)
        for choice, candidate in zip(decoding, candidates, strict=True):
            draft = drafts.get(choice.sequence.id)
            if draft is not None:
                ids = self._cut(choice, draft.ids[: candidate.max_drafts])
                if ids:
                    self._drafts[choice.sequence.id] = replace(draft, ids=ids)
        return {sequence_id: draft.ids for sequence_id, draft in self._drafts.items()}

    def _cut(self, choice: Choice, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Up to the first stop id and the first token that the grammar refuses; none if an id does not exist."""
        if any(not 0 <= token < self._vocab_size for token in ids):
            return ()
        matcher = self._matcher(choice)
        return tuple(ids if matcher is None else ids[: matcher.valid_prefix(ids)])

    def complete(self, piece: Slice) -> None:
        """Adds to the runner's order what speculation needs: the drafts' distributions, and hidden states back."""
        piece.hidden = piece.sample and self._speculation.wants_hidden()
        draft = self._drafts.get(piece.sequence.id)
        if piece.drafts and draft is not None and draft.distributions is not None:
            piece.distributions = draft.distributions[: len(piece.drafts)]

    def observe(self, entry: Entry, ids: list[int], accepted: int, hidden: np.ndarray | None = None) -> None:
        """What a step committed for a choice: ids, of which the first `accepted` were drafts; hidden: fp32 [rows,
        hidden_size], the states of its sampled rows if they were asked for."""
        request, proposed = entry.choice.request, len(entry.drafts)
        draft = self._drafts.get(entry.choice.sequence.id)
        proposer = draft.proposer if draft is not None and proposed else ""
        request.note_drafts(proposer, proposed, accepted)
        self._speculation.observe(entry.choice.sequence.id, proposer, proposed, accepted, ids)
        if hidden is not None:
            # States of rejected drafts stay behind.
            self._speculation.keep_hidden(entry.choice.sequence.id, hidden[len(ids) - 1])

    def step_done(self, rows: int, prefill: int, step_ms: float) -> None:
        """What a step cost: rows sampled, prompt tokens, milliseconds. Call it when its tokens are committed."""
        self._speculation.step_done(rows, prefill, step_ms)

    def idle(self) -> bool:
        """There is no step to take: tells of sequences that are gone. True if it must be tried again."""
        return self._speculation.idle()

    def close(self) -> None:
        self._speculation.close()
