"""One step as flat arrays: what a model's forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from tandem.lm.ops import padded
from tandem.lm.types import Slice


@dataclass(frozen=True)
class StepBatch:
    """Rows of all slices, one after another; `rows` are real, arrays over rows may be padded to the row tile.

    token_ids: int64 [padded rows]; query_start: int32 [slices + 1]; context_lens: int32 [slices], KV length after this
    step; block_tables: int32 [slices, most blocks], padded with 0; logit_rows: int64 [n], rows whose hidden state is
    wanted.
    """

    rows: int
    token_ids: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    logit_rows: np.ndarray
    block_size: int
    # Scratch of a model's own, for what is computed once per step.
    cache: dict[str, object] = field(default_factory=dict)

    # Made when a model reads them: the CPU kernels do not.

    @cached_property
    def positions(self) -> np.ndarray:
        """Position in its sequence of each row, int64 [padded rows]."""
        lengths = np.diff(self.query_start)
        # Of a row's number: what is the slice's own start is taken off, where it stands in its sequence is added.
        shift = self.context_lens - self.query_start[1:]
        positions = np.zeros(len(self.token_ids), dtype=np.int64)
        positions[: self.rows] = np.arange(self.rows) + np.repeat(shift, lengths)
        return positions

    @cached_property
    def slots(self) -> np.ndarray:
        """Where each row's KV goes, block · block_size + offset, int64 [rows]."""
        slices = np.repeat(np.arange(len(self.context_lens)), np.diff(self.query_start))
        blocks, offsets = np.divmod(self.positions[: self.rows], self.block_size)
        return self.block_tables[slices, blocks].astype(np.int64) * self.block_size + offsets


class KV(Protocol):
    """Paged KV of all layers, in whatever layout the model reads."""

    num_blocks: int
    block_size: int

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, source to destination, in every layer."""
        ...


class Model(Protocol):
    """A loaded model: computes a StepBatch over paged KV."""

    # False: answers may depend on the batch in their last bits.
    batch_invariant: bool
    # Such as "cpu/torch".
    kernel_path: str
    # dtype of weights and activations, for the numerics id.
    dtype_name: str
    # KV dtype if none is asked for.
    default_kv_dtype: str
    weight_bytes: int

    def kv_block_bytes(self, block_size: int, kv_dtype: str) -> int:
        """Bytes of one KV block over all layers. Raises ValueError for a dtype or size that it cannot do."""
        ...

    def new_kv(self, num_blocks: int, block_size: int, kv_dtype: str, max_rows: int) -> KV:
        """Reserves KV for steps of at most max_rows rows; memory is untouched until used."""
        ...

    def logits(self, batch: StepBatch, kv: KV) -> np.ndarray:
        """Writes KV; raw fp32 logits [len(logit_rows), vocab_size] of the batch's logit_rows."""
        ...

    def hidden(self, batch: StepBatch, kv: KV) -> np.ndarray:
        """Writes KV; final-norm hidden states fp32 [len(logit_rows), hidden_size]."""
        ...


class GivesHidden(Protocol):
    """What a model has besides if a head may draft from its hidden states."""

    def logits_and_hidden(self, batch: StepBatch, kv: KV) -> tuple[np.ndarray, np.ndarray]:
        """Both from one pass, each as its own method gives it, bit for bit."""
        ...

    def embedding_rows(self, ids: list[int]) -> np.ndarray:
        """Input embeddings as stored, without the model's multiplier, fp32 [len(ids), hidden_size]."""
        ...


def slice_tokens(item: Slice) -> list[int]:
    """Tokens whose KV a slice computes: the sequence's part, then drafts."""
    committed = item.sequence.token_ids[item.start : item.start + item.count]
    return [*committed, *item.drafts]


def build_batch(slices: list[Slice], logit_rows: np.ndarray, block_size: int, num_blocks: int) -> StepBatch:
    """Flattens slices.

    Raises:
        ValueError: a slice is empty, reaches beyond its tokens, or its block table is too short or out of range.
    """
    tokens: list[int] = []
    starts, contexts = [0], []
    widest = max((len(item.block_table) for item in slices), default=1)
    # One conversion for all tables: a small array for each would take longer than everything else here.
    blocks: list[int] = []
    for item in slices:
        ids = slice_tokens(item)
        end = item.start + len(ids)
        _check_slice(item, end, block_size)
        tokens += ids
        starts.append(len(tokens))
        contexts.append(end)
        blocks += item.block_table
        blocks += [0] * (widest - len(item.block_table))
    tables = np.array(blocks, dtype=np.int32).reshape(len(slices), widest)
    if blocks and not 0 <= tables.min() <= tables.max() < num_blocks:
        _check_tables(slices, num_blocks)
    rows = len(tokens)
    token_array = np.zeros(padded(rows), dtype=np.int64)
    token_array[:rows] = tokens
    return StepBatch(
        rows=rows,
        token_ids=token_array,
        query_start=np.array(starts, dtype=np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=tables,
        logit_rows=logit_rows,
        block_size=block_size,
    )


def _check_slice(item: Slice, end: int, block_size: int) -> None:
    committed = len(item.sequence.token_ids)
    reached = item.start + item.count
    problem = ""
    if item.count < 1 or item.start < 0 or reached > committed:
        problem = f"slice {item.start}+{item.count} is outside its {committed} tokens"
    elif item.drafts and reached != committed:
        problem = f"drafts need a slice that reaches token {committed}, not {reached}"
    elif len(item.block_table) * block_size < end:
        problem = f"{len(item.block_table)} blocks of {block_size} do not hold {end} tokens"
    if problem:
        raise ValueError(f"sequence {item.sequence.id}: {problem}")


def _check_tables(slices: list[Slice], num_blocks: int) -> None:
    for item in slices:
        if min(item.block_table) < 0 or max(item.block_table) >= num_blocks:
            raise ValueError(f"sequence {item.sequence.id}: block table leaves 0 to {num_blocks - 1}")
