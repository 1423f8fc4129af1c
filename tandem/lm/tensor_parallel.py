"""Tensor parallelism: each layer's heads and MLP columns are shared out over processes; rank 0 schedules and samples.

Rank 0 sends each step to the others; every rank computes its share of a layer, and the shares are gathered and added in
rank order, so that a row's sum does not depend on where it stands in the message. The bitwise promise therefore holds
within one tensor_parallel_size, which is part of the numerics id; another size rounds differently.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from tandem.lm.batch import KV, StepBatch
from tandem.lm.config import ModelConfig, UnsupportedModel
from tandem.lm.kv import KVCache
from tandem.lm.models.native import NativeModel
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.weights import RawTensor, WeightSource, open_source

# For all ranks to come up.
_START = timedelta(seconds=120)
# Ranks wait for the next step however long the engine idles; one that dies closes its connections and is seen at once.
_IDLE = timedelta(days=365)
# Matrices whose rows (outputs) are shared out, and those whose columns (inputs) are.
_BY_ROWS = ("q", "k", "v", "gate", "up")
_BY_COLUMNS = ("o", "down")


def check(config: ModelConfig, size: int) -> None:
    """Raises UnsupportedModel if the model cannot be shared out over `size` ranks."""
    inner = config.expert_intermediate_size if config.num_experts else config.intermediate_size
    for name, value in (("attention heads", config.num_heads), ("MLP columns", inner)):
        if value % size:
            raise UnsupportedModel(f"tensor_parallel_size is {size}, which does not divide {value} {name}")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise UnsupportedModel(
            f"tensor_parallel_size is {size}: {config.num_kv_heads} KV heads can be neither divided nor replicated"
        )


class ShardedSource:
    """One rank's share of a WeightSource, under a config with that many heads and columns."""

    def __init__(self, source: WeightSource, rank: int, size: int) -> None:
        check(source.config, size)
        self._source, self._rank, self._size = source, rank, size
        config = source.config
        self._head_dim, self._kv_heads = config.head_dim, config.num_kv_heads
        self.stored_bytes = source.stored_bytes
        self.config = replace(
            config,
            num_heads=config.num_heads // size,
            # Fewer KV heads than ranks: several ranks hold the same one.
            num_kv_heads=max(1, config.num_kv_heads // size),
            intermediate_size=config.intermediate_size // size,
            expert_intermediate_size=config.expert_intermediate_size // size,
            attention_scale=config.scale,
        )

    def _share(self, kind: str, length: int) -> slice:
        """The part of `length` rows or columns that this rank holds."""
        if kind in ("k", "v") and self._kv_heads < self._size:
            head = self._rank * self._kv_heads // self._size
            return slice(head * self._head_dim, (head + 1) * self._head_dim)
        step = length // self._size
        return slice(self._rank * step, (self._rank + 1) * step)

    def has(self, name: str) -> bool:
        kind, part = name.split(".")[-2:]
        # Sums over ranks would add these biases once per rank.
        if part == "bias" and kind in _BY_COLUMNS and self._rank:
            return False
        return self._source.has(name)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        value = self._source.tensor(name, dtype)
        kind, part = name.split(".")[-2:]
        if kind in _BY_ROWS:
            return value[self._share(kind, value.shape[0])].clone()
        if kind in _BY_COLUMNS and part == "weight":
            return value[:, self._share(kind, value.shape[1])].contiguous()
        return value

    def raw(self, name: str) -> RawTensor | None:
        return None

    def digest(self) -> str:
        return self._source.digest()

    def close(self) -> None:
        self._source.close()


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Adds the ranks' shares of x in rank order, in fp32; x's dtype out."""
    shares = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, x.contiguous())
    total = shares[0].float()
    for share in shares[1:]:
        total = total + share.float()
    return total.to(x.dtype)


@dataclass(frozen=True)
class _Command:
    """What rank 0 tells the others. kv: number of a KV cache."""

    name: str
    kv: int = 0
    arguments: tuple[Any, ...] = ()


def _send(command: _Command) -> None:
    dist.broadcast_object_list([command], src=0)


class _SharedKV:
    """KV of one number on all ranks; the others' parts go when this one does."""

    def __init__(self, number: int, local: KVCache) -> None:
        self.number, self.local = number, local
        self.num_blocks, self.block_size = local.num_blocks, local.block_size

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            _send(_Command("copy", self.number, (pairs,)))
            self.local.copy(pairs)


class TensorParallelModel:
    """Model on rank 0. Implements tandem.lm.batch.Model."""

    gives_hidden = True

    def __init__(self, local: NativeModel, size: int, processes: list[Any]) -> None:
        self._local, self._processes = local, processes
        self._next, self._live = 0, list[int]()
        self.batch_invariant, self.dtype_name = local.batch_invariant, local.dtype_name
        self.default_kv_dtype = local.default_kv_dtype
        self.kernel_path = f"{local.kernel_path}/tp{size}"
        # Embeddings and norms are on every rank: what rank 0 holds says what each needs.
        self.weight_bytes = local.weight_bytes * size
        self._size = size

    def kv_block_bytes(self, block_size: int, kv_dtype: str) -> int:
        return self._local.kv_block_bytes(block_size, kv_dtype) * self._size

    def new_kv(self, num_blocks: int, block_size: int, kv_dtype: str, max_rows: int) -> _SharedKV:
        # The first cache is the engine's; a later one is scratch that ends when the next begins.
        for number in self._live[1:]:
            _send(_Command("drop", number))
            self._live.remove(number)
        number, self._next = self._next, self._next + 1
        self._live.append(number)
        arguments = (num_blocks, block_size, kv_dtype, max_rows)
        _send(_Command("new_kv", number, arguments))
        return _SharedKV(number, self._local.new_kv(*arguments))

    def _run(self, name: str, batch: StepBatch, kv: KV) -> Any:
        shared = cast(_SharedKV, kv)
        _send(_Command(name, shared.number, (batch,)))
        return getattr(self._local, name)(batch, shared.local)

    def logits(self, batch: StepBatch, kv: KV) -> np.ndarray:
        return cast(np.ndarray, self._run("logits", batch, kv))

    def hidden(self, batch: StepBatch, kv: KV) -> np.ndarray:
        return cast(np.ndarray, self._run("hidden", batch, kv))

    def logits_and_hidden(self, batch: StepBatch, kv: KV) -> tuple[np.ndarray, np.ndarray]:
        return cast(tuple[np.ndarray, np.ndarray], self._run("logits_and_hidden", batch, kv))

    def embedding_rows(self, ids: list[int]) -> np.ndarray:
        # Every rank has the whole table.
        return self._local.embedding_rows(ids)

    def close(self) -> None:
        """Ends the other ranks."""
        if dist.is_initialized():
            _send(_Command("stop"))
            for process in self._processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
            dist.destroy_process_group()


def _join(settings: RunnerSettings, rank: int, meeting: str) -> torch.device:
    """Joins the group; returns this rank's device."""
    gpu = settings.device.startswith("cuda")
    store = dist.FileStore(meeting, settings.tensor_parallel_size)
    store.set_timeout(_START)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=rank,
        world_size=settings.tensor_parallel_size,
        timeout=_IDLE,
    )
    return torch.device(f"cuda:{rank}" if gpu else "cpu")


def _work(settings: RunnerSettings, dtype: torch.dtype, threads: int, rank: int, meeting: str) -> None:
    """Body of ranks 1 and up: does what rank 0 says until told to stop, or until rank 0 is gone."""
    torch.set_num_threads(threads)
    device = _join(settings, rank, meeting)
    source = ShardedSource(open_source(settings.model_path), rank, settings.tensor_parallel_size)
    model = NativeModel(source, dtype, device, None, sum_over_ranks)
    source.close()
    caches: dict[int, KVCache] = {}
    while True:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0)
        command = cast(_Command, box[0])
        if command.name == "stop":
            break
        if command.name == "new_kv":
            caches[command.kv] = model.new_kv(*command.arguments)
        elif command.name == "drop":
            del caches[command.kv]
        elif command.name == "copy":
            caches[command.kv].copy(*command.arguments)
        else:
            getattr(model, command.name)(*command.arguments, caches[command.kv])
    dist.destroy_process_group()


def load(
    settings: RunnerSettings,
    source: WeightSource,
    dtype: torch.dtype,
    threads: int,
    progress: Callable[[int, int], None],
) -> TensorParallelModel:
    """Starts the other ranks and loads this one's share. One group per process.

    Raises:
        UnsupportedModel: the model cannot be shared out so.
        RuntimeError: a rank does not come up in time.
    """
    size = settings.tensor_parallel_size
    check(source.config, size)
    if dist.is_initialized():
        raise RuntimeError("this process already belongs to a tensor-parallel group")
    share = max(1, threads // size)
    meeting = str(Path(tempfile.mkdtemp(prefix="tandem-tp-")) / "meeting")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_work, args=(settings, dtype, share, rank, meeting), daemon=True)
        for rank in range(1, size)
    ]
    for process in processes:
        process.start()
    torch.set_num_threads(share)
    device = _join(settings, 0, meeting)
    local = NativeModel(ShardedSource(source, 0, size), dtype, device, progress, sum_over_ranks)
    return TensorParallelModel(local, size, processes)
