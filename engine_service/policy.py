"""Limits of a step and the order in which choices are served."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.requests import Choice

Key = tuple[float, int, int]

# Prompt tokens of a shared step on a CPU. Its rate is reached at a few dozen rows, so larger steps only let more wait.
CPU_PREFILL_BUDGET = 64


def prefill_budget(setting: int, kernel_path: str) -> int:
    """The setting, or what suits the device that a kernel path such as cpu/avx2 names. 0: no limit."""
    return setting or (CPU_PREFILL_BUDGET if kernel_path.startswith("cpu") else 0)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy. Tokens, sequences, seconds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    # Most prompt tokens of one choice in a step that it shares with others.
    prefill_chunk: int
    policy: str = "fcfs"
    priority_age_s: float = 10.0
    # Most prompt tokens in all of a step that several share; 0: as many as the step has room for.
    prefill_budget: int = 0

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but must be at least max_num_seqs = "
                f"{self.max_num_seqs}, so that every running sequence can decode in each step"
            )

    @property
    def by_priority(self) -> bool:
        return self.policy == "priority"

    def key(self, choice: Choice) -> Key:
        """Smaller is served sooner, and lost later. Constant for the life of a choice."""
        request = choice.request
        sooner = request.arrival
        if self.by_priority:
            sooner += request.priority * self.priority_age_s
        return sooner, request.id, choice.sequence.choice

    def prefill_key(self, choice: Choice) -> tuple[int, int, Key]:
        """Order of prefills: the one with least left first, under `priority` within its rank."""
        rank = choice.request.priority if self.by_priority else 0
        return rank, choice.remaining, self.key(choice)
