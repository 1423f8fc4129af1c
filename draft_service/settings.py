"""Settings of the draft service."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from tandem.rpc import check_address, check_http_address
from tandem.settings import TracedSettings

PROPOSERS = ("ngram", "suffix", "table", "model")


class DraftSettings(TracedSettings):
    """Flags of `tandem draft`."""

    service: ClassVar[str] = "draft"

    listen: str = Field("127.0.0.1:50053", description="address to serve on: host:port or unix:/path")
    metrics_listen: str = Field("", description="host:port that serves /metrics over HTTP; empty: off")
    proposers: str = Field(
        "ngram,suffix", description=f"comma-separated proposers, of {', '.join(PROPOSERS)}; the best guess of all wins"
    )
    ngram_lengths: str = Field("6,4,3,2", description="n-gram lengths of prompt lookup, comma-separated")
    suffix_min_match: int = Field(2, ge=1, le=64, description="tokens of context that must agree for a suffix guess")
    suffix_store_tokens: int = Field(
        200_000, ge=0, le=10_000_000, description="tokens of finished outputs to learn from, over all salts; 0 for none"
    )
    suffix_store: str = Field("", description="file to keep learnt outputs in between runs; empty keeps them in memory")
    table: str = Field("", description="trained table for the proposer 'table': .npz file or name of a shipped one")
    model: str = Field("", description="model directory, .gguf or name for the proposer 'model'")
    model_drafts: int = Field(5, ge=1, le=32, description="most tokens per guess of a model; each costs one pass")
    model_kv_bytes: int = Field(134_217_728, ge=1, description="bytes of KV cache of a model proposer")
    max_sequences: int = Field(1024, ge=1, le=1_000_000, description="sequences held per engine; more are refused")
    max_sequence_tokens: int = Field(131_072, ge=1, description="tokens held per sequence; longer ones get no drafts")
    threads: int = Field(1, ge=1, le=1024, description="compute threads of a model proposer")

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        check_address(value)
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_listen(cls, value: str) -> str:
        return check_http_address(value)

    @field_validator("proposers")
    @classmethod
    def _proposers(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        unknown = [name for name in names if name not in PROPOSERS]
        if unknown:
            raise ValueError(f"unknown proposer {unknown[0]!r}; known: {', '.join(PROPOSERS)}")
        if not names or len(set(names)) != len(names):
            raise ValueError("name at least one proposer, each once")
        return ",".join(names)

    @field_validator("ngram_lengths")
    @classmethod
    def _lengths(cls, value: str) -> str:
        lengths = [part.strip() for part in value.split(",") if part.strip()]
        if not lengths or any(not part.isdigit() or not 1 <= int(part) <= 64 for part in lengths):
            raise ValueError("n-gram lengths are whole numbers from 1 to 64, comma-separated")
        return ",".join(lengths)

    @property
    def proposer_names(self) -> tuple[str, ...]:
        return tuple(self.proposers.split(","))
