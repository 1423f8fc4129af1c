"""What a runner needs to know before it loads a model. Plain data: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")
NUMERICS = ("fast", "exact")
KERNELS = ("auto", "torch", "native", "triton")
MODEL_IMPLS = ("auto", "native", "transformers")


@dataclass(frozen=True)
class RunnerSettings:
    """Settings of load_runner. Bytes, tokens and counts as named.

    Raises:
        ValueError: a value is out of range; the message names the field, the value and what is allowed.
    """

    # A .gguf file or a directory with config.json and safetensors.
    model_path: Path
    # Weights and activations; auto: what the device computes fast.
    dtype: str = "auto"
    # KV cache; auto: the activations' dtype.
    kv_dtype: str = "auto"
    # exact: fp32 everywhere; fast: the device's kernels.
    numerics: str = "fast"
    # CPU threads; 0: all cores that the process may use.
    threads: int = 0
    # cpu, cuda or cuda:N.
    device: str = "cpu"
    # Tokens per KV block.
    block_size: int = 16
    # Bytes of KV cache over all layers; 0: min(1 GiB, a quarter of the memory limit), on a GPU by its utilization.
    kv_cache_bytes: int = 0
    # Share of a GPU's memory for weights, activations and KV cache; 0: 0.9. Has no meaning on a CPU.
    gpu_memory_utilization: float = 0.0
    # Longest prompt plus output in tokens; 0: what the model was trained for.
    max_model_len: int = 0
    # Most tokens computed in one step.
    max_num_batched_tokens: int = 2048
    # Most sequences in one step.
    max_num_seqs: int = 256
    # Processes that share each layer.
    tensor_parallel_size: int = 1
    # auto: compiled kernels where they exist for this model and device; torch: the plain path;
    # native: the compiled CPU kernels or fail; triton: the GPU kernels or fail.
    kernels: str = "auto"
    # auto: the native family where it knows the architecture, else transformers.
    model_impl: str = "auto"
    # Run Python code that comes with the checkpoint.
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for field, allowed in (
            ("dtype", DTYPES),
            ("kv_dtype", KV_DTYPES),
            ("numerics", NUMERICS),
            ("kernels", KERNELS),
            ("model_impl", MODEL_IMPLS),
        ):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field} is {value!r}, but must be one of {', '.join(allowed)}")
        for field, least in (
            ("threads", 0),
            ("kv_cache_bytes", 0),
            ("max_model_len", 0),
            ("max_num_batched_tokens", 1),
            ("max_num_seqs", 1),
            ("tensor_parallel_size", 1),
        ):
            value = getattr(self, field)
            if value < least:
                raise ValueError(f"{field} is {value}, but must be at least {least}")
        if not 0 <= self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization is {self.gpu_memory_utilization}, but must be from 0 to 1")
        if self.gpu_memory_utilization and self.device == "cpu":
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, but the model runs on the CPU: "
                "set kv_cache_bytes to size the KV cache there"
            )
        if self.gpu_memory_utilization and self.kv_cache_bytes:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization} and kv_cache_bytes {self.kv_cache_bytes}, "
                "but each sizes the KV cache: set one of them"
            )
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ValueError(f"block_size is {self.block_size}, but must be 8, 16, 32, 64 or 128")
