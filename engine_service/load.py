"""Loads what an engine is made of: weights, tokenizer, runner, speculation."""

from __future__ import annotations

import logging

from engine_service.engine import Engine
from engine_service.settings import EngineSettings
from engine_service.speculation.controller import connect
from engine_service.speculation.head import load as load_head
from tandem.lm.runner import load_runner
from tandem.lm.runner_settings import RunnerSettings
from tandem.machine import keep_to_node, usable_cores
from tandem.models.store import resolve
from tandem.tokenizer import Tokenizer, load_bundle

log = logging.getLogger(__name__)


def load_engine(settings: EngineSettings) -> Engine:
    """Loads model, tokenizer and runner (blocking, minutes for a large model)."""
    model = resolve(settings.model)
    tokenizer = Tokenizer(load_bundle(model.path))
    device = _device(settings.device)
    if device == "cpu" and settings.tensor_parallel_size == 1:
        # Before weights and KV: memory is the node's whose core touches it first.
        node = keep_to_node(settings.threads or usable_cores(), settings.numa_node)
        if node is not None:
            log.info("keeping to NUMA node %d", node)
    runner = load_runner(
        RunnerSettings(
            model_path=model.path,
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            numerics=settings.numerics,
            threads=settings.threads,
            device=device,
            block_size=settings.block_size,
            kv_cache_bytes=settings.kv_cache_bytes,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            tensor_parallel_size=settings.tensor_parallel_size,
            kernels=settings.kernels,
            model_impl=settings.model_impl,
            trust_remote_code=settings.trust_remote_code,
        )
    )
    speculation = connect(settings, runner.spec.vocab_size, load_head(settings.head, runner))
    names = tuple(name.strip() for name in settings.served_model_name.split(",") if name.strip()) or (model.name,)
    return Engine(settings, runner, tokenizer, speculation, names)


def _device(name: str) -> str:
    """What "auto" means here: the first NVIDIA or AMD GPU that torch can use, else the CPU."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
