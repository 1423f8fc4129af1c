"""From a path and settings to a model on its device: dtypes, threads, memory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tandem.lm.batch import Model
from tandem.lm.config import ModelConfig, UnsupportedModel
from tandem.lm.runner_settings import RunnerSettings

log = logging.getLogger(__name__)

_GIB = 1 << 30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class KVShape:
    """What the KV cache needs to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what its spec needs."""

    model: Model
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    kv: KVShape
    model_digest: str


def cpu_threads(settings: RunnerSettings) -> int:
    """Threads in use: the setting, or all cores that this process may run on."""
    if settings.threads:
        return settings.threads
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:
        return max(1, os.cpu_count() or 1)


def weight_dtype(settings: RunnerSettings, stored: str) -> torch.dtype:
    """dtype of weights and activations. Exact numerics are fp32 throughout.

    Raises:
        ValueError: another dtype was asked for together with exact numerics.
    """
    if settings.numerics == "exact":
        if settings.dtype not in ("auto", "float32") or settings.kv_dtype not in ("auto", "float32"):
            raise ValueError(
                f"numerics exact means float32, but dtype is {settings.dtype} and kv_dtype {settings.kv_dtype}"
            )
        return torch.float32
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    if settings.device == "cpu":
        # Without bf16 instructions bf16 products are an order of magnitude slower than fp32.
        fast = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
        return torch.bfloat16 if fast and stored == "bfloat16" else torch.float32
    return _DTYPES.get(stored, torch.bfloat16) if stored != "float32" else torch.bfloat16


def kv_dtype(settings: RunnerSettings, dtype: torch.dtype) -> torch.dtype:
    return dtype if settings.kv_dtype == "auto" else _DTYPES[settings.kv_dtype]


def memory_limit() -> int:
    """Bytes that this process may use: the cgroup's limit or the machine's memory."""
    total = psutil.virtual_memory().total
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(total, int(text))
    return total


def kv_budget(settings: RunnerSettings) -> int:
    """Bytes for the KV cache: the setting, or min(1 GiB, a quarter of the memory limit)."""
    return settings.kv_cache_bytes or min(_GIB, memory_limit() // 4)


def load_model(settings: RunnerSettings, progress: Callable[[int, int], None] | None = None) -> Loaded:
    """Loads weights.

    Raises:
        WeightError: the checkpoint cannot be read.
        UnsupportedModel: it cannot be run rightly; the message says why.
        ValueError: settings that contradict each other.
    """
    try:
        return _load_native(settings, progress)
    except UnsupportedModel as error:
        if settings.model_impl == "native" or settings.model_path.is_file():
            raise
        log.info("not native (%s); trying the transformers path", error)
    raise UnsupportedModel(f"{settings.model_path}: no path runs this model")


def _load_native(settings: RunnerSettings, progress: Callable[[int, int], None] | None) -> Loaded:
    from tandem.lm.models.native import NativeModel
    from tandem.lm.weights import open_source

    if settings.model_impl == "transformers":
        raise UnsupportedModel("model_impl is transformers")
    source = open_source(settings.model_path)
    try:
        config: ModelConfig = source.config
        model = NativeModel(source, weight_dtype(settings, config.torch_dtype), torch.device(settings.device), progress)
        return Loaded(
            model=model,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            max_position=config.max_position,
            kv=KVShape(config.num_layers, config.num_kv_heads, config.head_dim),
            model_digest=source.digest(),
        )
    finally:
        source.close()


def numerics_id(settings: RunnerSettings, loaded: Loaded, kv: torch.dtype, threads: int) -> str:
    """Digest of all that an answer's bits depend on: 16 hex digits."""
    parts = {
        "weights": loaded.model_digest,
        "numerics": settings.numerics,
        "dtype": str(getattr(loaded.model, "dtype", "")),
        "kv_dtype": str(kv),
        "kernels": loaded.model.kernel_path,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": threads,
        "tensor_parallel": settings.tensor_parallel_size,
        "batch_invariant": loaded.model.batch_invariant,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
