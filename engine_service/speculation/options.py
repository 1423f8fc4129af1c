"""What the engine's settings say about speculation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What the engine's settings say about speculation."""

    # Longest wait for an answer before a step, milliseconds.
    timeout_ms: float = 2.0
    # With more decoding sequences no draft is sought.
    max_batch: int = 16
    # Most drafts per sequence and step.
    max_drafts: int = 16
    # Verify sampled rows by rejection (Leviathan/Chen) instead of keep-while-equal.
    rejection: bool = False
    # Ids at or above this are no tokens; 0: unknown, not checked.
    vocab_size: int = 0
    # A question unanswered for longer breaks the connection off, seconds.
    stall_s: float = 1.0
    # Proposers allowed, in order of preference; empty: all.
    proposers: tuple[str, ...] = ()
