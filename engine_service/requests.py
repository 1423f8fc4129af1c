"""The nouns of scheduling: a request, its choices, and where each stands. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tandem.block_hash import ROOT, hash_block
from tandem.lm.types import SamplingParams, Sequence


class Status(Enum):
    """Where a choice stands."""

    FORKING = "waits for the request's first choice to compute the prompt"
    WAITING = "in the queue, holds no blocks"
    RUNNING = "in the batch"
    FINISHED = "done, holds no blocks"


@dataclass(slots=True, eq=False)
class Request:
    """One Generate call. Times are seconds of one monotonic clock."""

    id: int
    name: str
    params: SamplingParams
    prompt: list[int]
    arrival: float
    salt: bytes = b""
    priority: int = 0
    deadline: float | None = None
    choices: list[Choice] = field(default_factory=list)
    # Score the prompt: reads no cached prefix until that is done.
    score_prompt: bool = False
    # traceparent of the span that the draft's belong to; "" if nobody traces.
    trace: str = ""
    # Neither logged with traffic nor learnt from by drafts.
    no_store: bool = False
    # Choices that will fork from the first one; each has a seat in the batch reserved.
    forking: int = 0
    # What happened, for usage and receipt.
    first_step: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    cached_tokens: int = 0
    cached_blocks: int = 0
    preemptions: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    steps: int = 0
    accepted_by_proposer: dict[str, int] = field(default_factory=dict)
    proposed_by_proposer: dict[str, int] = field(default_factory=dict)
    # accepted_by_position[i]: times that draft i of a step, from 0, was accepted.
    accepted_by_position: list[int] = field(default_factory=list)
    verifications: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification of drafts, the sampled one included; 1 without drafts."""
        return 1.0 + self.drafts_accepted / self.verifications if self.verifications else 1.0

    def note_drafts(self, proposer: str, proposed: int, accepted: int) -> None:
        """A step verified `proposed` drafts of a choice, and kept the first `accepted`."""
        if not proposed:
            return
        self.verifications += 1
        self.drafts_proposed += proposed
        self.drafts_accepted += accepted
        self.proposed_by_proposer[proposer] = self.proposed_by_proposer.get(proposer, 0) + proposed
        if accepted:
            self.accepted_by_proposer[proposer] = self.accepted_by_proposer.get(proposer, 0) + accepted
        missing = accepted - len(self.accepted_by_position)
        self.accepted_by_position.extend([0] * missing)
        for place in range(accepted):
            self.accepted_by_position[place] += 1

    @property
    def unfinished(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.status is not Status.FINISHED]


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of a request and its KV: tokens [0, num_computed) are written in `blocks`."""

    request: Request
    sequence: Sequence
    # Most output tokens, from max_tokens and the context.
    max_output: int
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    # Leading blocks that were offered to the prefix cache since the choice entered the batch.
    registered: int = 0
    # Chain hashes of full blocks of token_ids; grown on demand, valid for good since tokens never change.
    hashes: list[bytes] = field(default_factory=list)
    # Prompt positions 1 … scored have their score.
    scored: int = 0
    admitted_before: bool = False

    @property
    def remaining(self) -> int:
        """Committed tokens without KV; 1 means that the choice decodes."""
        return len(self.sequence.token_ids) - self.num_computed

    def grow_hashes(self, blocks: int, block_size: int) -> None:
        """Makes `hashes` cover the first `blocks` blocks, all of which must be full of committed tokens."""
        ids = self.sequence.token_ids
        for index in range(len(self.hashes), blocks):
            parent = self.hashes[-1] if self.hashes else ROOT
            tokens = ids[index * block_size : (index + 1) * block_size]
            self.hashes.append(hash_block(parent, self.request.salt, tokens))

    @property
    def wants_scores(self) -> bool:
        """The prompt's scores are wanted from this choice and not complete."""
        leader = self.request.score_prompt and self.request.choices[0] is self
        return leader and self.scored < self.sequence.prompt_len - 1
