"""What can be set on a gateway."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from tandem.settings import TracedSettings

DEFAULT_MAX_BODY = 32 * 1024 * 1024


class GatewaySettings(TracedSettings):
    """Settings of one gateway (all its worker processes)."""

    service: ClassVar[str] = "gateway"

    host: str = Field("127.0.0.1", description="address to listen on; a wider one without keys warns")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    workers: int = Field(1, ge=1, le=64, description="worker processes that share the port and the rate limits")
    router: str = Field("127.0.0.1:8100", description="router (or engine) to ask: host:port or unix:/path")
    router_admin: str = Field(
        "127.0.0.1:8101",
        description="the router's admin address, for the live page: host:port or unix:/path; empty: none",
    )
    page: bool = Field(True, description="serve the live page at / and its data under /tandem/")
    mcp: bool = Field(True, description="serve tools for agents at /mcp (Model Context Protocol)")
    recent_requests: int = Field(
        500, ge=0, le=100_000, description="finished requests kept with their receipts for the live page; 0: none"
    )
    grace: float = Field(30.0, ge=0, le=3600, description="seconds that running requests get after SIGTERM")

    keys_file: str = Field("", description="file with hashed API keys (JSON); empty: no keys are asked for")
    share_cache: bool = Field(False, description="let different keys share cached prefixes")
    cors_origins: str = Field("", description="comma-separated origins that browsers may call from; * for all")

    max_body_bytes: int = Field(DEFAULT_MAX_BODY, ge=1024, le=200 * 1024 * 1024, description="largest request body")
    body_timeout: float = Field(30.0, gt=0, le=3600, description="seconds that a client may take to send its body")
    max_n: int = Field(128, ge=1, le=1024, description="most choices per prompt")
    max_prompts: int = Field(1024, ge=1, le=100_000, description="most prompts in one request")
    request_timeout: float = Field(0.0, ge=0, description="seconds until a request expires; 0: never")
    header_delay: float = Field(
        10.0, gt=0, le=600, description="seconds after which a waiting stream gets headers and keep-alive comments"
    )
    coalesce_ms: float = Field(
        20.0, ge=0, le=1000, description="longest wait between two writes of a stream when the gateway is busy; 0: none"
    )

    chat_template: str = Field("", description="file with a chat template that replaces the checkpoint's")
    allow_request_templates: bool = Field(False, description="accept chat_template in requests (sandboxed)")
    tool_parser: str = Field(
        "auto",
        description="format of tool calls in the model's text: auto, hermes, llama3, mistral, pythonic or deepseek",
        pattern="^(auto|hermes|llama3|mistral|pythonic|deepseek)$",
    )
    reasoning_parser: str = Field(
        "auto", description="what splits reasoning from the answer: auto, think or none", pattern="^(auto|think|none)$"
    )

    tls_cert: str = Field("", description="certificate chain for HTTPS (PEM file)")
    tls_key: str = Field("", description="private key for HTTPS (PEM file)")
    tls_client_ca: str = Field("", description="authority that client certificates must come from (PEM file)")
    router_tls_ca: str = Field("", description="authority of the router's certificate; turns TLS on for gRPC")
    router_tls_cert: str = Field("", description="our certificate towards the router (mTLS)")
    router_tls_key: str = Field("", description="its private key")
    service_token_file: str = Field("", description="file with the token that Tandem's services share")
