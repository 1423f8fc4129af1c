"""Settings of the engine."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from tandem.rpc import check_http_address
from tandem.settings import TracedSettings

BLOCK_SIZES = (8, 16, 32, 64, 128)


class EngineSettings(TracedSettings):
    """All that an engine process can be told. Bytes, tokens, seconds and milliseconds as named."""

    service: ClassVar[str] = "engine"

    listen: str = Field("127.0.0.1:50051", description="address to serve on, host:port or unix:/path")
    model: str = Field("smollm2-135m-instruct", description="model name, directory, .gguf file or Hugging Face id")
    served_model_name: str = Field("", description="names that clients may use, comma-separated; default: the model's")
    metrics_listen: str = Field("", description="host:port that serves /metrics over HTTP; empty: off")
    engine_name: str = Field("", description="name of this engine in receipts and logs; default: the listen address")

    # What the model runs on.
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    dtype: str = Field("auto", description="weights and activations", pattern="^(auto|float32|bfloat16|float16)$")
    kv_dtype: str = Field(
        "auto",
        description="KV cache: auto, float32, bfloat16, float16, int8 (CPU kernels) or fp8 (GPU kernels)",
        pattern="^(auto|float32|bfloat16|float16|int8|fp8)$",
    )
    numerics: str = Field("fast", description="exact (fp32 everywhere) or fast", pattern="^(exact|fast)$")
    kernels: str = Field("auto", description="auto, torch (plain path) or native", pattern="^(auto|torch|native)$")
    model_impl: str = Field("auto", description="auto, native or transformers", pattern="^(auto|native|transformers)$")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the checkpoint")
    threads: int = Field(0, ge=0, description="compute threads; 0: all cores that the process may use")
    numa_node: int = Field(
        -1,
        ge=-1,
        description="node that the compute threads keep to if they fit one; -1: the one with the most free memory",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="processes that share each layer")

    # KV cache.
    kv_cache_bytes: int = Field(
        0, ge=0, description="bytes of KV cache; 0: min(1 GiB, a quarter of the memory limit), on a GPU what is left"
    )
    gpu_memory_utilization: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the GPU's memory for weights, activations and KV cache; 0: 0.9; on a CPU refused",
    )
    block_size: int = Field(16, description="tokens per KV block: 8 (on a CPU the torch path only), 16, 32, 64 or 128")
    prefix_caching: bool = Field(True, description="reuse the KV of equal prompt beginnings")

    # Scheduling.
    max_model_len: int = Field(0, ge=0, description="longest prompt plus output; 0: what model and KV cache allow")
    max_num_seqs: int = Field(64, ge=1, le=4096, description="most sequences in a step")
    max_num_batched_tokens: int = Field(1024, ge=1, description="most tokens computed in a step")
    prefill_chunk: int = Field(256, ge=1, description="most prompt tokens of one sequence in a step shared with others")
    prefill_budget: int = Field(
        0,
        ge=0,
        description="most prompt tokens in all of a step that several requests share; 0: 64 on a CPU, else no limit",
    )
    scheduling_policy: str = Field("fcfs", description="fcfs or priority", pattern="^(fcfs|priority)$")
    priority_age_s: float = Field(10.0, gt=0, description="seconds of waiting that outweigh one step of priority")
    max_waiting: int = Field(64, ge=0, description="most requests that wait for a free seat; more are refused at once")

    # Requests.
    max_n: int = Field(16, ge=1, description="most choices per request")
    max_logprobs: int = Field(20, ge=0, description="most alternatives per token")
    grammar_max_bytes: int = Field(262_144, ge=1, description="largest grammar or schema source")
    grammar_timeout_s: float = Field(5.0, gt=0, description="longest compilation of a grammar")
    stream_buffer_bytes: int = Field(4_194_304, ge=1024, description="unread output per stream before it is dropped")
    stream_interval_ms: float = Field(
        10.0,
        ge=0,
        description="longest time that a token of a short step waits to leave with the next ones; 0: none waits",
    )

    # Speculation.
    draft: str = Field("", description="address of the draft service; empty: none")
    head: str = Field(
        "auto",
        description="draft head: auto (the shipped one that was trained for this very model, if any), none or a file",
    )
    draft_timeout_ms: float = Field(2.0, gt=0, description="longest wait for drafts in a step")
    max_drafts: int = Field(16, ge=0, le=32, description="most drafted tokens per sequence and step")
    draft_max_batch: int = Field(16, ge=1, description="no drafts are sought when more sequences decode")
    draft_stall_s: float = Field(
        1.0, gt=0, description="seconds without an answer after which the draft is reconnected"
    )
    verification: str = Field("exact", description="exact or rejection", pattern="^(exact|rejection)$")

    # Traffic.
    traffic_log: str = Field(
        "",
        description="directory that gets the token ids of finished requests without a salt, to train drafts from; "
        "empty: none",
    )
    traffic_log_bytes: int = Field(
        268_435_456, ge=65_536, description="size of that directory; the oldest files make room"
    )

    # Life.
    grace: float = Field(30.0, ge=0, description="seconds that a drain gives to running requests")
    stall_limit: float = Field(30.0, gt=0, description="seconds after which a step counts as hung")

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_listen(cls, value: str) -> str:
        return check_http_address(value)

    @field_validator("block_size")
    @classmethod
    def _block_size(cls, value: int) -> int:
        if value not in BLOCK_SIZES:
            raise ValueError(f"block_size is {value}, but must be one of {', '.join(map(str, BLOCK_SIZES))}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> EngineSettings:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but must be at least max_num_seqs "
                f"({self.max_num_seqs})"
            )
        if self.kernels == "native" and self.block_size % 16:
            raise ValueError(
                f"block_size is {self.block_size}, but the CPU kernels need a multiple of 16: raise it, or choose "
                "kernels auto, which then takes the torch path"
            )
        return self
