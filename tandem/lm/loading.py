"""From a path and settings to a model on its device: which path runs it, dtypes, threads, memory."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.lm.batch import Model
from tandem.lm.config import UnsupportedModel
from tandem.lm.runner_settings import RunnerSettings
from tandem.lm.weights import WeightSource, open_source
from tandem.lm.weights.source import file_digest
from tandem.machine import usable_cores

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what its spec needs."""

    model: Model
    architecture: str
    vocab_size: int
    hidden_size: int
    # Longest sequence that the model runs here.
    max_model_len: int
    model_digest: str
    threads: int


def cpu_threads(settings: RunnerSettings) -> int:
    """Threads in use: the setting, or all cores that affinity and cgroup quota leave to this process."""
    return settings.threads or usable_cores()


def weight_dtype(settings: RunnerSettings, stored: str) -> torch.dtype:
    """dtype of weights and activations on the torch path. Exact numerics are fp32 throughout."""
    if settings.numerics == "exact":
        return torch.float32
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    if settings.device == "cpu":
        # Without bf16 instructions bf16 products are an order of magnitude slower than fp32.
        fast = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
        return torch.bfloat16 if fast and stored == "bfloat16" else torch.float32
    return _DTYPES.get(stored, torch.bfloat16) if stored != "float32" else torch.bfloat16


def load_model(settings: RunnerSettings, progress: Progress) -> Loaded:
    """Loads weights on the first path that runs this model rightly.

    Raises:
        WeightError: the checkpoint cannot be read.
        UnsupportedModel: it cannot be run rightly; the message says why.
        ValueError: settings that contradict each other or the model.
    """
    if settings.numerics == "exact" and not {settings.dtype, settings.kv_dtype} <= {"auto", "float32"}:
        raise ValueError(
            f"numerics exact means float32, but dtype is {settings.dtype} and kv_dtype {settings.kv_dtype}"
        )
    if settings.model_impl == "transformers":
        return _generic(settings)
    try:
        source = open_source(settings.model_path)
    except UnsupportedModel as error:
        if settings.model_impl == "native" or settings.model_path.is_file():
            raise
        log.info("%s; trying the transformers path", error)
        return _generic(settings)
    try:
        digest = source.digest()
        model = _native(settings, source, digest, progress)
        config = source.config
        return Loaded(
            model=model,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            max_model_len=max_model_len(settings, config.max_position),
            model_digest=digest,
            threads=cpu_threads(settings),
        )
    finally:
        source.close()


def _generic(settings: RunnerSettings) -> Loaded:
    """Any architecture, through transformers."""
    from tandem.lm.models.generic import GenericModel
    from tandem.lm.weights.safetensors_dir import TensorFiles, read_config

    path = settings.model_path
    if settings.tensor_parallel_size > 1:
        raise UnsupportedModel("models through transformers run with tensor_parallel_size 1 only")
    if settings.kernels == "native":
        raise UnsupportedModel("the compiled kernels do not run models through transformers")
    config = read_config(path)
    # Refuses a directory without safetensors before transformers looks for other forms.
    files = TensorFiles(path)
    digest = file_digest(files.files, json.dumps(config, sort_keys=True).encode())
    files.close()
    torch.set_num_threads(cpu_threads(settings))
    dtype = weight_dtype(settings, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    model = GenericModel(path, dtype, torch.device(settings.device), settings.trust_remote_code)
    return Loaded(
        model=model,
        architecture=(config.get("architectures") or [config.get("model_type")])[0],
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        max_model_len=max_model_len(settings, model.max_position),
        model_digest=digest,
        threads=cpu_threads(settings),
    )


def max_model_len(settings: RunnerSettings, max_position: int) -> int:
    """Raises ValueError if the setting exceeds what the model was trained for."""
    if settings.max_model_len > max_position:
        raise ValueError(f"max_model_len is {settings.max_model_len}, but the model has {max_position} positions")
    return settings.max_model_len or max_position


def _native(settings: RunnerSettings, source: WeightSource, digest: str, progress: Progress) -> Model:
    """The device's kernels where they can (Triton on GPUs, compiled ones on CPUs), else plain torch."""
    from tandem.lm.models.native import NativeModel

    threads = cpu_threads(settings)
    if settings.tensor_parallel_size > 1:
        return _tensor_parallel(settings, source, threads, progress)
    if settings.kernels == "triton" or (settings.kernels == "auto" and settings.device != "cpu"):
        try:
            return _triton(settings, source, progress)
        except UnsupportedModel as error:
            if settings.kernels == "triton":
                raise
            log.warning("on the torch path: %s", error)
    elif settings.device == "cpu" and settings.kernels != "torch":
        try:
            return _compiled(settings, source, digest, threads, progress)
        except UnsupportedModel as error:
            if settings.kernels == "native":
                raise
            log.warning("on the torch path: %s", error)
    torch.set_num_threads(threads)
    dtype = weight_dtype(settings, source.config.torch_dtype)
    return NativeModel(source, dtype, torch.device(settings.device), progress)


def _tensor_parallel(settings: RunnerSettings, source: WeightSource, threads: int, progress: Progress) -> Model:
    """The plain torch path, shared out over processes."""
    from tandem.lm import tensor_parallel

    if settings.kernels not in ("auto", "torch"):
        raise UnsupportedModel(f"kernels {settings.kernels!r} do not run with tensor_parallel_size above 1")
    dtype = weight_dtype(settings, source.config.torch_dtype)
    return tensor_parallel.load(settings, source, dtype, threads, progress)


def _triton(settings: RunnerSettings, source: WeightSource, progress: Progress) -> Model:
    try:
        from tandem.lm.models.triton_model import TritonModel
    except ImportError as error:
        raise UnsupportedModel(f"the Triton kernels are not available: {error}") from error
    positions = max_model_len(settings, source.config.max_position)
    dtype = weight_dtype(settings, source.config.torch_dtype)
    return TritonModel(source, dtype, torch.device(settings.device), positions, progress)


def _compiled(settings: RunnerSettings, source: WeightSource, digest: str, threads: int, progress: Progress) -> Model:
    try:
        from kernels import cpu
    except ImportError as error:
        raise UnsupportedModel(f"the CPU kernels are not available: {error}") from error
    if not cpu.available():
        raise UnsupportedModel(f"the CPU kernels are not available: {cpu.reason()}")
    if settings.dtype == "float16":
        raise UnsupportedModel("the CPU kernels have no float16")
    if settings.block_size % 16:
        raise UnsupportedModel(f"the CPU kernels need blocks of a multiple of 16 tokens, not {settings.block_size}")
    from tandem.lm.models import compiled

    # The kernels have threads of their own; torch only helps the sampler, and two pools would fight.
    torch.set_num_threads(1)
    compiled.set_threads(threads)
    positions = max_model_len(settings, source.config.max_position)
    exact = settings.numerics == "exact"
    return compiled.CompiledModel(source, settings.dtype, exact, positions, digest, progress)


def numerics_id(settings: RunnerSettings, loaded: Loaded, kv_dtype: str) -> str:
    """Digest of all that an answer's bits depend on: 16 hex digits."""
    parts = {
        "weights": loaded.model_digest,
        "numerics": settings.numerics,
        "dtype": loaded.model.dtype_name,
        "kv_dtype": kv_dtype,
        "kernels": loaded.model.kernel_path,
        "arithmetic": getattr(loaded.model, "arithmetic", 1),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": loaded.threads,
        "tensor_parallel": settings.tensor_parallel_size,
        "batch_invariant": loaded.model.batch_invariant,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
