"""What a draft service proposed, checked: nothing that it says is believed to be well-formed."""

from __future__ import annotations

import numpy as np

from engine_service.speculation import MAX_DRAFTS
from engine_service.speculation.sequence_state import Kept
from tandem.draft.v1 import draft_pb2 as pb


def checked(proposal: pb.Proposal, vocab: int) -> Kept | None:
    """The proposal as something to keep; None if it is malformed. vocab: ids from here on are no tokens; 0: unknown."""
    ids = tuple(proposal.draft_ids)
    if proposal.status != pb.PROPOSAL_STATUS_OK:
        return None
    if not 0 < len(ids) <= MAX_DRAFTS or (vocab and max(ids) >= vocab):
        return None
    distributions = None
    if proposal.distributions:
        distributions = _distributions(proposal, vocab)
        if distributions is None:
            return None
    confidence = proposal.confidence if 0.0 <= proposal.confidence <= 1.0 else 0.0
    return Kept(proposal.base_len, ids, proposal.proposer[:32], confidence, distributions)


def _distributions(proposal: pb.Proposal, vocab: int) -> tuple[tuple[np.ndarray, np.ndarray], ...] | None:
    """Each draft's sparse distribution: int64 ids and fp32 probabilities that sum to 1. None if any is malformed."""
    if len(proposal.distributions) != len(proposal.draft_ids):
        return None
    result = []
    for token, entry in zip(proposal.draft_ids, proposal.distributions, strict=True):
        ids, chances = np.array(entry.ids, np.int64), np.array(entry.probabilities, np.float32)
        if (
            ids.size == 0
            or ids.size != chances.size
            or np.unique(ids).size != ids.size
            or (vocab and ids.max() >= vocab)
        ):
            return None
        if not np.isfinite(chances).all() or (chances < 0).any() or abs(float(chances.sum()) - 1) > 1e-3:
            return None
        if not (chances[ids == token] > 0).any():
            return None
        result.append((ids, chances / chances.sum()))
    return tuple(result)
