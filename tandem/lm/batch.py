"""One step as flat arrays: what a model's forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tandem.lm.ops import padded
from tandem.lm.types import Slice


@dataclass(frozen=True)
class StepBatch:
    """Rows of all slices, one after another; `rows` are real, arrays over rows may be padded to the row tile.

    token_ids, positions: int64 [padded rows]; slots: int64 [rows], block · block_size + offset; query_start: int32
    [slices + 1]; context_lens: int32 [slices], KV length after this step; block_tables: int32 [slices, most blocks],
    padded with 0; logit_rows: int64 [n], rows whose hidden state is wanted.
    """

    rows: int
    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    logit_rows: np.ndarray
    block_size: int
    # Scratch of a model's own, for what is computed once per step.
    cache: dict[str, object] = field(default_factory=dict)


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
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    starts, contexts = [0], []
    widest = max((len(item.block_table) for item in slices), default=1)
    tables = np.zeros((len(slices), widest), dtype=np.int32)
    for index, item in enumerate(slices):
        ids = slice_tokens(item)
        end = item.start + len(ids)
        _check_slice(item, len(ids), end, block_size, num_blocks)
        table = np.asarray(item.block_table, dtype=np.int64)
        where = np.arange(item.start, end)
        tokens += ids
        positions.append(where)
        slots.append(table[where // block_size] * block_size + where % block_size)
        starts.append(starts[-1] + len(ids))
        contexts.append(end)
        tables[index, : len(table)] = table
    rows = len(tokens)
    size = padded(rows)
    token_array, position_array = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    token_array[:rows] = tokens
    position_array[:rows] = np.concatenate(positions)
    return StepBatch(
        rows=rows,
        token_ids=token_array,
        positions=position_array,
        slots=np.concatenate(slots),
        query_start=np.asarray(starts, dtype=np.int32),
        context_lens=np.asarray(contexts, dtype=np.int32),
        block_tables=tables,
        logit_rows=logit_rows,
        block_size=block_size,
    )


def _check_slice(item: Slice, length: int, end: int, block_size: int, num_blocks: int) -> None:
    name = f"sequence {item.sequence.id}"
    committed = len(item.sequence.token_ids)
    if item.count < 1 or item.start < 0 or item.start + item.count > committed:
        raise ValueError(f"{name}: slice {item.start}+{item.count} is outside its {committed} tokens")
    if item.drafts and item.start + item.count != committed:
        raise ValueError(f"{name}: drafts need a slice that reaches token {committed}, not {item.start + item.count}")
    if len(item.block_table) * block_size < end:
        raise ValueError(f"{name}: {len(item.block_table)} blocks of {block_size} do not hold {end} tokens")
    if length and (min(item.block_table) < 0 or max(item.block_table) >= num_blocks):
        raise ValueError(f"{name}: block table leaves 0 to {num_blocks - 1}")
