"""Settings of the router."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from router.discovery import parse_engines
from tandem.rpc import check_address
from tandem.settings import TracedSettings

POLICIES = ("round_robin", "least_load", "consistent_hash", "prefix_approx", "prefix_exact")


class RouterSettings(TracedSettings):
    """Where the router listens, which engines it uses and how it chooses among them."""

    service: ClassVar[str] = "router"

    listen: str = Field("127.0.0.1:8100", description="address of InferenceService: host:port or unix:/path")
    admin_listen: str = Field(
        "127.0.0.1:8101", description="address of RouterAdminService: host:port or unix:/path; empty turns it off"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="HTTP port of /metrics on loopback; 0 turns it off")
    metrics_host: str = Field("127.0.0.1", description="host that /metrics binds")
    engines: str = Field("", description="engines, comma-separated: host:port, unix:/path or dns:name:port")
    resolve_interval_s: float = Field(5.0, gt=0, le=3600, description="seconds between look-ups of dns: names")
    workers: int = Field(1, ge=1, le=64, description="processes that share the listen port (SO_REUSEPORT)")
    service_token_file: str = Field("", description="file with the token that services show each other; empty: none")
    drain_grace_s: float = Field(30.0, ge=0, le=86400, description="seconds that live streams may take after SIGTERM")

    policy: str = Field("prefix_exact", description="routing policy: " + ", ".join(POLICIES))
    load_interval_ms: int = Field(250, ge=50, le=10_000, description="milliseconds between load reports of an engine")
    index_max_blocks: int = Field(
        4_000_000, ge=1_000, le=1_000_000_000, description="most (block, engine) pairs in the prefix index"
    )
    prediction_ttl_s: float = Field(
        10.0, gt=0, le=3600, description="seconds that a just routed prompt counts as cached before events confirm it"
    )

    max_queued: int = Field(1024, ge=0, le=1_000_000, description="most requests that wait in the router")
    queue_timeout_s: float = Field(0.0, ge=0, le=86400, description="longest wait in the queue, seconds; 0: no limit")
    ageing_s: float = Field(10.0, gt=0, le=3600, description="seconds of waiting that make up for one step of priority")
    tenant_max_running: int = Field(0, ge=0, le=1_000_000, description="most running requests per tenant; 0: no limit")
    tenant_max_queued: int = Field(0, ge=0, le=1_000_000, description="most waiting requests per tenant; 0: no limit")
    request_timeout_s: float = Field(0.0, ge=0, le=86400, description="deadline of every request, seconds; 0: none")

    max_retries: int = Field(2, ge=0, le=10, description="retries of a request that makes no progress")
    retry_budget: float = Field(0.2, ge=0, le=1, description="most retries at once, as a share of live requests")
    retry_jitter_ms: int = Field(50, ge=0, le=10_000, description="most milliseconds that a retry is put off")
    resume_wait_s: float = Field(
        30.0, ge=0, le=3600, description="seconds that an accepted request waits for an engine that can go on with it"
    )
    resume_max_bytes: int = Field(
        256 * 1024 * 1024, ge=0, description="memory for the forwarded bytes of live requests (needed to resume)"
    )
    stall_limit_s: float = Field(10.0, gt=0, le=3600, description="seconds without progress after which it is hung")
    crash_refusal_s: float = Field(600.0, ge=0, le=86400, description="seconds that a request that killed is refused")
    stream_buffer_bytes: int = Field(
        1024 * 1024, ge=1024, description="bytes buffered for a slow reader before the engine is held back"
    )
    coalesce_ms: float = Field(
        20.0, ge=0, le=1000, description="longest wait between two writes of a stream when the router is busy; 0: none"
    )

    eject_failures: int = Field(3, ge=1, le=1000, description="failures in a row that make an engine suspect")
    eject_s: float = Field(1.0, gt=0, le=3600, description="first rest of a suspect engine, doubled up to 30 s")

    recorder_size: int = Field(1000, ge=0, le=1_000_000, description="routing decisions kept in memory")
    recorder_file: str = Field("", description="JSON lines file for routing decisions (no prompts); empty: none")

    @field_validator("engines")
    @classmethod
    def _engines(cls, value: str) -> str:
        parse_engines(value)
        return value

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        return check_address(value)

    @field_validator("admin_listen")
    @classmethod
    def _admin_listen(cls, value: str) -> str:
        return check_address(value) if value else value

    @field_validator("policy")
    @classmethod
    def _policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"known policies: {', '.join(POLICIES)}")
        return value
