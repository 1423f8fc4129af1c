"""Embeddings: pooled final hidden states, over a KV cache that lives for one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tandem.lm.batch import KV, Model, build_batch
from tandem.lm.types import ModelSpec, SamplingParams, Sequence, Slice


def embed(
    model: Model,
    new_kv: Callable[[int], KV],
    prompts: list[list[int]],
    pooling: str,
    normalize: bool,
    spec: ModelSpec,
    token_budget: int,
) -> np.ndarray:
    """fp32 [len(prompts), hidden_size]; pooling is "mean" or "last".

    Raises:
        ValueError: an unknown pooling, or a prompt that is empty or longer than the model allows.
    """
    if pooling not in ("mean", "last"):
        raise ValueError(f"pooling is {pooling!r}, but must be mean or last")
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= spec.max_model_len:
            raise ValueError(f"prompt {index} has {len(prompt)} tokens, but must have 1 to {spec.max_model_len}")
    out = np.zeros((len(prompts), spec.hidden_size), dtype=np.float32)
    for group in _groups(prompts, token_budget):
        tables, used = [], 0
        for index in group:
            need = -(-len(prompts[index]) // spec.block_size)
            tables.append(list(range(used, used + need)))
            used += need
        kv = new_kv(used)
        for index, states in _states(model, kv, prompts, group, tables, token_budget):
            out[index] += states[-1] if pooling == "last" else states.sum(axis=0, dtype=np.float32)
        if pooling == "mean":
            for index in group:
                out[index] /= np.float32(len(prompts[index]))
    if normalize:
        # Zero stays zero.
        out /= np.maximum(np.sqrt((out.astype(np.float64) ** 2).sum(axis=1, keepdims=True)), 1e-12).astype(np.float32)
    return out


def _groups(prompts: list[list[int]], budget: int) -> Iterator[list[int]]:
    """Prompts that fit one step together; one longer than a step is alone."""
    group: list[int] = []
    size = 0
    for index, prompt in enumerate(prompts):
        if group and size + len(prompt) > budget:
            yield group
            group, size = [], 0
        group.append(index)
        size += len(prompt)
    if group:
        yield group


def _states(
    model: Model, kv: KV, prompts: list[list[int]], group: list[int], tables: list[list[int]], budget: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(prompt, its final hidden states fp32 [prompt length, hidden]). A prompt's states come whole, so that a sum over
    them does not depend on the step size."""
    found: dict[int, list[np.ndarray]] = {index: [] for index in group}
    longest = max(len(prompts[index]) for index in group)
    step = budget if len(group) == 1 else longest
    for start in range(0, longest, step):
        slices = [
            Slice(
                Sequence(index, 0, SamplingParams(), prompts[index], len(prompts[index])),
                table,
                start,
                min(step, len(prompts[index]) - start),
                sample=False,
            )
            for index, table in zip(group, tables, strict=True)
        ]
        total = sum(item.count for item in slices)
        batch = build_batch(slices, np.arange(total), kv.block_size, kv.num_blocks)
        hidden = model.hidden(batch, kv)
        at = 0
        for item in slices:
            found[item.sequence.id].append(hidden[at : at + item.count])
            at += item.count
    for index, parts in found.items():
        yield index, np.concatenate(parts)
