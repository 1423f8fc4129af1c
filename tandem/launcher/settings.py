"""Settings of `tandem serve` itself. Flags of the services may stand beside them and are passed on."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from tandem.settings import Settings


class ServeSettings(Settings):
    """What the launcher decides; everything else belongs to the services."""

    service: ClassVar[str] = "serve"

    host: str = Field("127.0.0.1", description="address that the gateway binds", min_length=1)
    port: int = Field(8000, description="port of the gateway", ge=1, le=65535)
    engines: int = Field(1, description="engines to start, each with its own draft", ge=1, le=64)
    model: str = Field("smollm2-135m-instruct", description="name, folder, .gguf file or Hugging Face id", min_length=1)
    draft: str = Field(
        "auto", description="auto, none, or the proposers of the draft service, such as ngram or suffix", min_length=1
    )
    metrics_port: int = Field(
        0, description="first of the loopback ports for /metrics: router, engines, drafts; 0: none", ge=0, le=65000
    )
    run_dir: Path | None = Field(None, description="folder for the internal sockets; default: a new one")
    ready_timeout_s: float = Field(600.0, description="seconds until every service must be ready", gt=0)
