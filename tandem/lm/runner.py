"""The runner: executes steps of slices on one device. See tandem.lm.types.Runner for the interface."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from tandem.lm import loading
from tandem.lm.batch import build_batch
from tandem.lm.embedding import embed
from tandem.lm.kv import KVCache
from tandem.lm.ops import ROW_TILE
from tandem.lm.processors import Row
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.sampler import Sampler
from tandem.lm.scores import token_scores
from tandem.lm.types import ModelSpec, Runner, Slice, SliceOutput, TokenScore

log = logging.getLogger(__name__)

# Prompt logits are reduced in tiles of so many rows: a vocabulary of 150,000 in fp32 is 40 MB then.
_PROMPT_TILE = 64


class TorchRunner:
    """Runner over any Model. One thread calls it."""

    def __init__(self, settings: RunnerSettings, loaded: loading.Loaded, threads: int) -> None:
        self._settings, self._loaded = settings, loaded
        self._model = loaded.model
        dtype = loading.kv_dtype(settings, getattr(loaded.model, "dtype", torch.float32))
        shape = loaded.kv
        block_bytes = KVCache.block_bytes(
            shape.num_layers, shape.num_kv_heads, settings.block_size, shape.head_dim, dtype
        )
        budget = loading.kv_budget(settings)
        blocks = budget // block_bytes
        max_len = settings.max_model_len or loaded.max_position
        if max_len > loaded.max_position:
            raise ValueError(f"max_model_len is {max_len}, but the model has {loaded.max_position} positions")
        if blocks < 2:
            raise ValueError(f"kv_cache_bytes is {budget}, but two blocks need {2 * block_bytes}")
        self._new_kv: Callable[[int], KVCache] = lambda count: KVCache(
            shape.num_layers,
            count,
            shape.num_kv_heads,
            settings.block_size,
            shape.head_dim,
            dtype,
            torch.device(settings.device),
        )
        self._kv = self._new_kv(blocks)
        self._sampler = Sampler(loaded.vocab_size)
        self.spec = ModelSpec(
            architecture=loaded.architecture,
            vocab_size=loaded.vocab_size,
            hidden_size=loaded.hidden_size,
            max_model_len=max_len,
            block_size=settings.block_size,
            num_blocks=blocks,
            block_bytes=block_bytes,
            weight_bytes=loaded.model.weight_bytes,
            model_digest=loaded.model_digest,
            numerics_id=loading.numerics_id(settings, loaded, dtype, threads),
            batch_invariant=loaded.model.batch_invariant,
            kernel_path=loaded.model.kernel_path,
            threads=threads,
        )

    def execute(self, slices: list[Slice]) -> list[SliceOutput]:
        """Runs one step and samples; outputs parallel `slices`.

        Raises:
            ValueError: a slice contradicts its sequence or its block table.
        """
        if not slices:
            return []
        plan = _RowPlan(slices)
        batch = build_batch(slices, plan.logit_rows, self.spec.block_size, self.spec.num_blocks)
        hidden = self._model.forward(batch, self._kv)
        outputs = [SliceOutput() for _ in slices]
        self._score_prompts(hidden, plan, slices, outputs)
        if plan.samples:
            self._sample(hidden, plan, slices, outputs)
        return outputs

    def _logits(self, hidden: torch.Tensor, rows: np.ndarray) -> np.ndarray:
        """Raw fp32 logits [len(rows), vocab] of rows of `hidden`."""
        size = -(-len(rows) // ROW_TILE) * ROW_TILE
        index = np.zeros(size, dtype=np.int64)
        index[: len(rows)] = rows
        logits = self._model.logits(hidden[torch.from_numpy(index).to(hidden.device)])
        return logits[: len(rows), : self.spec.vocab_size].cpu().numpy()

    def _score_prompts(
        self, hidden: torch.Tensor, plan: _RowPlan, slices: list[Slice], outputs: list[SliceOutput]
    ) -> None:
        for index, (first, count) in plan.prompt_rows.items():
            item = slices[index]
            ids = item.sequence.token_ids[item.start + 1 : item.start + 1 + count]
            scores: list[TokenScore] = []
            for start in range(0, count, _PROMPT_TILE):
                rows = np.arange(first + start, first + min(start + _PROMPT_TILE, count))
                logits = self._logits(hidden, rows)
                wanted = ids[start : start + len(rows)]
                scores += token_scores(logits, wanted, [item.sequence.params.prompt_logprobs or 0] * len(rows))
            outputs[index].prompt_scores = scores

    def _sample(self, hidden: torch.Tensor, plan: _RowPlan, slices: list[Slice], outputs: list[SliceOutput]) -> None:
        logits = self._logits(hidden, np.concatenate([rows for _, rows in plan.samples]))
        rows = [row for index, _ in plan.samples for row in _rows_of(slices[index])]
        sampled = self._sampler.sample(logits, rows)
        at = 0
        scored: list[tuple[SliceOutput, int, int]] = []
        for index, own in plan.samples:
            output = outputs[index]
            _verify(slices[index], sampled.ids[at : at + len(own)], sampled.errors, at, output)
            if slices[index].sequence.params.logprobs is not None:
                scored.append((output, at, slices[index].sequence.params.logprobs or 0))
            at += len(own)
        _score_sampled(logits, scored)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies KV of whole blocks, source to destination."""
        self._kv.copy(pairs)

    def embed(self, prompts: list[list[int]], pooling: str, normalize: bool) -> np.ndarray:
        """Pooled final hidden states, fp32 [prompts, hidden_size]; keeps no KV.

        Raises:
            ValueError: an unknown pooling or an empty or too long prompt.
        """
        return embed(
            self._model, self._new_kv, prompts, pooling, normalize, self.spec, self._settings.max_num_batched_tokens
        )

    def forget(self, sequence_id: int) -> None:
        """Drops what is held about a sequence that has ended."""
        self._sampler.forget(sequence_id)

    def close(self) -> None:
        """Frees weights and KV."""
        del self._model, self._kv, self._loaded


class _RowPlan:
    """Which rows of a step need the final hidden state, and for what.

    logit_rows: int64, rows of the batch; samples: (slice, indices into logit_rows); prompt_rows: slice → (first index
    into logit_rows, count).
    """

    def __init__(self, slices: list[Slice]) -> None:
        wanted: list[np.ndarray] = []
        self.samples: list[tuple[int, np.ndarray]] = []
        self.prompt_rows: dict[int, tuple[int, int]] = {}
        base = size = 0
        for index, item in enumerate(slices):
            if item.score_prompt:
                count = max(0, min(item.count, item.sequence.prompt_len - 1 - item.start))
                self.prompt_rows[index] = (size, count)
                wanted.append(np.arange(base, base + count))
                size += count
            if item.sample:
                rows = np.arange(base + item.count - 1, base + item.count + len(item.drafts))
                self.samples.append((index, np.arange(size, size + len(rows))))
                wanted.append(rows)
                size += len(rows)
            base += item.count + len(item.drafts)
        self.logit_rows = np.concatenate(wanted) if wanted else np.empty(0, dtype=np.int64)


def _rows_of(item: Slice) -> list[Row]:
    """The rows that a slice samples; row i is as if the drafts before i were committed."""
    if item.mask is not None and len(item.mask) != 1 + len(item.drafts):
        raise ValueError(
            f"sequence {item.sequence.id}: mask has {len(item.mask)} rows, expected {1 + len(item.drafts)}"
        )
    return [
        Row(item.sequence, item.drafts[:count], None if item.mask is None else item.mask[count])
        for count in range(1 + len(item.drafts))
    ]


def _verify(item: Slice, ids: np.ndarray, errors: dict[int, str], at: int, output: SliceOutput) -> None:
    """Keep-while-equal: commits sampled ids up to and with the first that differs from its draft."""
    for row, token in enumerate(ids.tolist()):
        if error := errors.get(at + row):
            output.error = error
            return
        output.token_ids.append(token)
        if row >= len(item.drafts) or token != item.drafts[row]:
            return
        output.accepted += 1


def _score_sampled(logits: np.ndarray, scored: list[tuple[SliceOutput, int, int]]) -> None:
    """Fills `scores` of outputs that want them: (output, its first row of logits, alternatives)."""
    rows = [first + step for output, first, _ in scored for step in range(len(output.token_ids))]
    ids = [token for output, _, _ in scored for token in output.token_ids]
    alternatives = [count for output, _, count in scored for _ in output.token_ids]
    found = iter(token_scores(logits[rows], ids, alternatives) if rows else [])
    for output, _, _ in scored:
        output.scores = [next(found) for _ in output.token_ids]


def load_runner(settings: RunnerSettings) -> Runner:
    """Loads the model and reserves its KV cache.

    Raises:
        WeightError: the checkpoint cannot be read.
        UnsupportedModel: it cannot be run rightly; the message says why.
        ValueError: settings that do not fit the model or each other.
    """
    started = time.monotonic()
    threads = loading.cpu_threads(settings)
    torch.set_num_threads(threads)
    last = 0

    def progress(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // total
        if tenth > last:
            last = tenth
            log.info("loading weights: %d%%", 10 * tenth)

    loaded = loading.load_model(settings, progress)
    runner = TorchRunner(settings, loaded, threads)
    spec = runner.spec
    log.info(
        "loaded %s in %.1f s: weights %d MiB, KV %d blocks of %d tokens (%d MiB), %s, numerics %s",
        spec.architecture,
        time.monotonic() - started,
        spec.weight_bytes >> 20,
        spec.num_blocks,
        spec.block_size,
        spec.num_blocks * spec.block_bytes >> 20,
        spec.kernel_path,
        spec.numerics_id,
    )
    return runner
