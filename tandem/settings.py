"""Settings: one frozen, validated object per service.

Origin of a value, strongest first: flag, environment variable TANDEM_<FLAG>, TOML file (--config), default.
A TOML file has one table per service ([gateway], [router], [engine], [draft], [serve]); unknown keys are refused.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

ENV_PREFIX = "TANDEM_"


class SettingsError(ValueError):
    """A setting that cannot be used: names the setting, its origin, the value and what is allowed."""


class Settings(BaseModel):
    """Base of every service's settings. Field descriptions become --help and docs."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    service: ClassVar[str] = ""

    log_level: str = Field("info", description="debug, info, warning or error", pattern="^(debug|info|warning|error)$")


class TracedSettings(Settings):
    """Settings of a service whose requests can be traced (OpenTelemetry)."""

    otlp_endpoint: str = Field(
        "",
        description="where traces go (OTLP), such as http://host:4317; empty: OTEL_EXPORTER_OTLP_ENDPOINT, else off",
    )
    otlp_protocol: str = Field(
        "",
        description="grpc or http/protobuf; empty: OTEL_EXPORTER_OTLP_PROTOCOL, or grpc",
        pattern="^(grpc|http/protobuf)?$",
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="share of requests that are traced, unless their traceparent has decided already"
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp_endpoint(cls, value: str) -> str:
        """An absolute http or https URL. Credentials belong into OTEL_EXPORTER_OTLP_HEADERS, which nobody prints."""
        if not value:
            return value
        try:
            parts = urlsplit(value)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise ValueError("http://host:port or https://host:port is needed")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError(
                "no user, password, query or fragment may be in it; tokens go into OTEL_EXPORTER_OTLP_HEADERS"
            )
        return value


S = TypeVar("S", bound=Settings)


def env_name(field: str) -> str:
    return ENV_PREFIX + field.upper()


def known_tables() -> set[str]:
    """Names of the TOML tables that may appear in a config file."""
    return {"gateway", "router", "engine", "draft", "serve"}


def _from_file(path: Path, cls: type[Settings]) -> dict[str, Any]:
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"--config {path}: {error}") from error
    unknown = sorted(set(data) - known_tables())
    if unknown:
        raise SettingsError(
            f"--config {path}: unknown table [{unknown[0]}]; known: {', '.join(sorted(known_tables()))}"
        )
    table = {key.replace("-", "_"): value for key, value in data.get(cls.service, {}).items()}
    for key in table:
        if key not in cls.model_fields:
            raise SettingsError(f"--config {path}: unknown key {key!r} in [{cls.service}]")
    return table


def _from_env(env: Mapping[str, str], cls: type[Settings]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in cls.model_fields:
        raw = env.get(env_name(field))
        if raw is None:
            continue
        if field == "port" and raw.startswith("tcp://"):
            raise SettingsError(
                f"{env_name(field)}={raw} comes from Kubernetes, which sets it for a Service named tandem: "
                "set enableServiceLinks: false in the pod or rename the Service"
            )
        found[field] = raw
    return found


def load_settings(
    cls: type[S],
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    config: Path | None = None,
) -> tuple[S, dict[str, str]]:
    """Builds the settings and tells each value's origin ("flag", "environment", "file", "default").

    Raises:
        SettingsError: a value is out of range, of the wrong type or unknown.
    """
    env = os.environ if env is None else env
    if config is None and env.get("TANDEM_CONFIG"):
        config = Path(env["TANDEM_CONFIG"])
    layers = [
        ("file", _from_file(config, cls) if config else {}),
        ("environment", _from_env(env, cls)),
        ("flag", {key: value for key, value in (flags or {}).items() if value is not None}),
    ]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(cls.model_fields, "default")
    for origin, layer in layers:
        for key, value in layer.items():
            values[key], origins[key] = value, origin
    try:
        return cls(**values), origins
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else "?"
        flag = "--" + field.replace("_", "-")
        raise SettingsError(
            f"{flag} (from {origins.get(field, 'flag')}) is {first.get('input')!r}: {first['msg']}"
        ) from error
