"""The runner: executes steps of slices on one device. See tandem.lm.types.Runner for the interface."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from tandem.lm import loading, memory, rejection
from tandem.lm.batch import KV, GivesHidden, build_batch
from tandem.lm.embedding import embed
from tandem.lm.processors import Row
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.sampler import Sampler
from tandem.lm.scores import token_scores
from tandem.lm.types import ModelSpec, Runner, Slice, SliceOutput, TokenScore

log = logging.getLogger(__name__)

Scorer = Callable[[np.ndarray, list[int], list[int]], list[TokenScore]]

# Prompt logits are reduced in tiles of so many rows: a vocabulary of 150,000 in fp32 is 40 MB then.
_PROMPT_TILE = 64


@dataclass(frozen=True)
class Start:
    """Memory as it was before the weights: bytes of this process (0 where a GPU computes), and the GPU's."""

    base: int = 0
    gpu: memory.GpuMemory | None = None


class ModelRunner:
    """Runner over any Model. One thread calls it."""

    def __init__(self, settings: RunnerSettings, loaded: loading.Loaded, start: Start) -> None:
        self._settings, self._model = settings, loaded.model
        kv_dtype = loaded.model.default_kv_dtype if settings.kv_dtype == "auto" else settings.kv_dtype
        block_bytes = loaded.model.kv_block_bytes(settings.block_size, kv_dtype)
        # Every sequence of a full step may decode.
        max_rows = max(settings.max_num_batched_tokens, settings.max_num_seqs)
        self._new_kv: Callable[[int], KV] = lambda count: loaded.model.new_kv(
            count, settings.block_size, kv_dtype, max_rows
        )
        # A model on a GPU leaves its logits there, and brings the sampler that reads them.
        self._forward = getattr(loaded.model, "raw_logits", loaded.model.logits)
        self._sampler = getattr(loaded.model, "new_sampler", Sampler)(loaded.vocab_size)
        self._host_sampler = Sampler(loaded.vocab_size)
        self._scores: Scorer = getattr(loaded.model, "token_scores", token_scores)
        budget, workspace = self._budget(loaded, start, max_rows)
        blocks = budget // block_bytes
        if blocks < 2:
            raise ValueError(f"kv_cache_bytes is {budget}, but two blocks need {2 * block_bytes}")
        self._kv = self._new_kv(blocks)
        self.memory = memory.MemoryPlan(loaded.model.weight_bytes, blocks * block_bytes, workspace, start.base)
        self.spec = ModelSpec(
            architecture=loaded.architecture,
            vocab_size=loaded.vocab_size,
            hidden_size=loaded.hidden_size,
            max_model_len=loaded.max_model_len,
            block_size=settings.block_size,
            num_blocks=blocks,
            block_bytes=block_bytes,
            weight_bytes=loaded.model.weight_bytes,
            model_digest=loaded.model_digest,
            numerics_id=loading.numerics_id(settings, loaded, kv_dtype),
            batch_invariant=loaded.model.batch_invariant,
            kernel_path=loaded.model.kernel_path,
            threads=loaded.threads,
            workspace_bytes=workspace,
            base_bytes=start.base,
            gives_hidden=getattr(loaded.model, "gives_hidden", False),
        )

    def _budget(self, loaded: loading.Loaded, start: Start, max_rows: int) -> tuple[int, int]:
        """Bytes for the KV cache, and of working memory that the largest step takes."""
        settings = self._settings
        if start.gpu is None:
            width = getattr(loaded.model, "row_width", 16 * loaded.hidden_size)
            step = memory.step_bytes(max_rows, width, settings.max_num_seqs, loaded.vocab_size)
            return memory.cpu_kv_bytes(settings), step
        peak = memory.activation_peak(settings, loaded.max_model_len, self._new_kv, self._forward, self._sampler)
        if settings.kv_cache_bytes:
            return settings.kv_cache_bytes, peak
        utilization = settings.gpu_memory_utilization or memory.DEFAULT_UTILIZATION
        after = memory.GpuMemory.of(settings.device)
        return memory.gpu_kv_bytes(utilization, start.gpu, after, peak), peak

    def execute(self, slices: list[Slice]) -> list[SliceOutput]:
        """Runs one step and samples; outputs parallel `slices`.

        Raises:
            ValueError: a slice contradicts its sequence or its block table.
        """
        outputs = [SliceOutput() for _ in slices]
        slices = [
            self._score_prompt(item, output) if item.score_prompt else item
            for item, output in zip(slices, outputs, strict=True)
        ]
        if slices:
            self._step(slices, outputs)
        return outputs

    def _score_prompt(self, item: Slice, output: SliceOutput) -> Slice:
        """Scores a slice's prompt tokens in steps of few rows, and returns what is left of it: the last row.

        Logits of a whole prompt would take gigabytes. Which rows share a step changes no bits.
        """
        sequence = item.sequence
        output.prompt_scores = []
        alternatives = sequence.params.prompt_logprobs or 0
        end = item.start + item.count
        for start in range(item.start, end, _PROMPT_TILE):
            stop = min(start + _PROMPT_TILE, end)
            ids = sequence.token_ids[start + 1 : min(stop + 1, sequence.prompt_len)]
            part = replace(item, start=start, count=stop - start, drafts=(), sample=False, mask=None)
            logits = _host(self._logits([part], np.arange(len(ids)))[0])
            output.prompt_scores += self._scores(logits, ids, [alternatives] * len(ids))
        # The last row once more, for its sample: it writes the same KV.
        return replace(item, start=end - 1, count=1)

    def _logits(self, slices: list[Slice], rows: np.ndarray) -> tuple[Any, np.ndarray | None]:
        """Runs a forward pass.

        Raw fp32 logits [len(rows), vocab] of rows of the flattened step, as the sampler reads; final hidden states
        fp32 [len(rows), hidden_size] if a slice asks for them.
        """
        batch = build_batch(slices, rows, self.spec.block_size, self.spec.num_blocks)
        if not any(item.hidden for item in slices):
            return self._forward(batch, self._kv)[:, : self.spec.vocab_size], None
        if not self.spec.gives_hidden:
            raise ValueError(f"hidden states were asked for, but {self.spec.kernel_path} gives none")
        logits, hidden = cast(GivesHidden, self._model).logits_and_hidden(batch, self._kv)
        return logits[:, : self.spec.vocab_size], hidden

    def _step(self, slices: list[Slice], outputs: list[SliceOutput]) -> None:
        """One forward pass for all slices; samples those that ask for it."""
        rows: list[Row] = []
        wanted: list[int] = []
        firsts: list[int] = []
        base = 0
        for item in slices:
            firsts.append(len(rows))
            if item.sample:
                rows += _rows_of(item)
                wanted += range(base + item.count - 1, base + item.count + len(item.drafts))
            base += item.count + len(item.drafts)
        logits, hidden = self._logits(slices, np.asarray(wanted, dtype=np.int64))
        if not rows:
            return
        sampled = self._sampler.sample(logits, rows)
        scored: list[tuple[SliceOutput, int, int]] = []
        for item, output, first in zip(slices, outputs, firsts, strict=True):
            if not item.sample:
                continue
            stop = first + 1 + len(item.drafts)
            if item.hidden and hidden is not None:
                output.hidden = hidden[first:stop]
            if item.distributions is None:
                _verify(item, sampled.ids[first:stop], sampled.errors, first, output)
            else:
                rejection.verify(self._host_sampler, _host(logits[first:stop]), item, rows[first:stop], output)
            if item.sequence.params.logprobs is not None:
                scored.append((output, first, item.sequence.params.logprobs))
        _score_sampled(self._scores, logits, scored)

    def idle(self) -> bool:
        """Does one piece of work that waits for an idle gap (capturing a decode step). Whether more is waiting."""
        return bool(getattr(self._model, "idle", bool)())

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

    def embedding_rows(self, ids: list[int]) -> np.ndarray:
        """Input embeddings as the model stores them, fp32 [len(ids), hidden_size].

        Raises:
            ValueError: an id that the model does not know, or a model that does not give its embeddings.
        """
        if not self.spec.gives_hidden:
            raise ValueError(f"embedding rows were asked for, but {self.spec.kernel_path} gives none")
        if ids and not 0 <= min(ids) <= max(ids) < self.spec.vocab_size:
            raise ValueError(f"ids run from {min(ids)} to {max(ids)}, but the vocabulary has {self.spec.vocab_size}")
        return cast(GivesHidden, self._model).embedding_rows(ids)

    @property
    def embedding_tiles(self) -> Any:
        """The input embedding in the compiled kernels' tiles; None on other paths."""
        return getattr(self._model, "embedding_tiles", None)

    def forget(self, sequence_id: int) -> None:
        """Drops what is held about a sequence that has ended."""
        self._sampler.forget(sequence_id)
        self._host_sampler.forget(sequence_id)

    def close(self) -> None:
        """Frees weights and KV, and ends other processes of the model."""
        getattr(self._model, "close", bool)()
        del self._model, self._kv, self._forward


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


def _host(logits: Any) -> np.ndarray:
    """Logits as an array: arrays as they are, tensors of any device copied."""
    return logits if isinstance(logits, np.ndarray) else logits.cpu().numpy()


def _score_sampled(score: Scorer, logits: Any, scored: list[tuple[SliceOutput, int, int]]) -> None:
    """Fills `scores` of outputs that want them: (output, its first row of logits, alternatives)."""
    rows = [first + step for output, first, _ in scored for step in range(len(output.token_ids))]
    ids = [token for output, _, _ in scored for token in output.token_ids]
    alternatives = [count for output, _, count in scored for _ in output.token_ids]
    found = iter(score(_host(logits[rows]), ids, alternatives) if rows else [])
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
    last = 0

    def progress(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // total
        if tenth > last:
            last = tenth
            log.info("loading weights: %d%%", 10 * tenth)

    on_cpu = settings.device == "cpu"
    start = Start(memory.resident()) if on_cpu else Start(gpu=memory.GpuMemory.of(settings.device))
    loaded = loading.load_model(settings, progress)
    runner = ModelRunner(settings, loaded, start)
    spec = runner.spec
    log.info(
        "loaded %s in %.1f s: KV %d blocks of %d tokens, %s, numerics %s",
        spec.architecture,
        time.monotonic() - started,
        spec.num_blocks,
        spec.block_size,
        spec.kernel_path,
        spec.numerics_id,
    )
    log.info("memory: %s", runner.memory)
    return runner
