"""The nouns that engine and runner share. Plain data: no torch here, so that the scheduler stays pure and light.

A step is described by slices: what each sequence (request × choice) computes in it. The runner computes KV and logits,
samples every row that asks for it, verifies drafts by keep-while-equal, and returns what was committed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters of one request, in the meaning of the contract's SamplingParams."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    # Ids that min_tokens holds back: the model's stop ids and the request's.
    stop_token_ids: tuple[int, ...] = ()
    # Alternatives per sampled token; None: no logprobs.
    logprobs: int | None = None
    # Alternatives per prompt token; None: no prompt logprobs.
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: its tokens and how to sample it. The scheduler owns it; the runner only reads it.

    `token_ids` = prompt + committed output; the output position of the row after it is len(token_ids) - prompt_len.
    """

    id: int
    choice: int
    params: SamplingParams
    token_ids: list[int]
    prompt_len: int
    # traceparent for whoever proposes drafts; "" if nobody traces.
    trace: str = ""
    # Nothing of it may be kept or learnt from when it has ended.
    no_store: bool = False

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(slots=True, eq=False)
class Slice:
    """What one sequence does in one step.

    Computes KV for sequence.token_ids[start : start + count] and then for `drafts` (only when the slice reaches the end
    of token_ids). If `sample`, the last committed row and every draft row are sampled: 1 + len(drafts) rows.
    """

    sequence: Sequence
    # Physical block of logical block i; covers every position written in this step.
    block_table: list[int]
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    sample: bool = True
    # Grammar: int32 bitmask [1 + len(drafts), ceil(vocab / 32)], bit = allowed, lowest id in the lowest bit.
    # None: all allowed.
    mask: np.ndarray | None = None
    # Score prompt tokens start+1 .. start+count (the prompt's first token has no score).
    score_prompt: bool = False
    # Sparse draft distributions, one per draft: (ids, probabilities). Not None: verify by rejection.
    distributions: tuple[tuple[np.ndarray, np.ndarray], ...] | None = None
    # Hand over the final hidden states of the sampled rows.
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-softmax of the raw fp32 logits at one position: the token's, its rank from 1, and the most likely ids."""

    id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class SliceOutput:
    """What a slice committed: accepted drafts and the token sampled after them (empty if the slice did not sample).

    The first mismatch ends `token_ids`; stop ids, stop strings and limits are the caller's to apply. `accepted` counts
    the drafts kept. `scores` parallels token_ids if logprobs were asked for. `error` is an ErrorReason name.
    """

    token_ids: list[int] = field(default_factory=list)
    accepted: int = 0
    scores: list[TokenScore] | None = None
    prompt_scores: list[TokenScore] | None = None
    error: str | None = None
    # fp32 [1 + drafts, hidden_size] if the slice asked: states after the final norm. Row i gave token_ids[i].
    hidden: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the rest of the engine must know of a loaded model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    # Bytes of KV in one block over all layers.
    block_bytes: int
    weight_bytes: int
    model_digest: str
    numerics_id: str
    batch_invariant: bool
    kernel_path: str
    threads: int
    # Working memory of the largest step, and of the process before the weights (0 where a GPU computes).
    workspace_bytes: int = 0
    base_bytes: int = 0
    # Slices may ask for hidden states, and the runner for embedding rows.
    gives_hidden: bool = False


class Runner(Protocol):
    """Executes steps on a device. One thread calls it."""

    spec: ModelSpec

    def execute(self, slices: list[Slice]) -> list[SliceOutput]:
        """Runs one step and samples; outputs parallel `slices`. Reads slices only during the call."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies KV of whole blocks, source to destination, before the next step (copy-on-write)."""
        ...

    def embed(self, prompts: list[list[int]], pooling: str, normalize: bool) -> np.ndarray:
        """Pooled final hidden states, fp32 [len(prompts), hidden_size]. pooling is "mean" or "last". Keeps no KV."""
        ...

    def embedding_rows(self, ids: list[int]) -> np.ndarray:
        """Input embeddings of tokens as the model stores them, fp32 [len(ids), hidden_size].

        Raises ValueError if the model does not give them (spec.gives_hidden).
        """
        ...

    def forget(self, sequence_id: int) -> None:
        """Drops what the runner may hold about a sequence that has ended."""
        ...

    def close(self) -> None:
        """Frees memory and threads."""
        ...
