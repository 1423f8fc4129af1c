"""Where each service's settings and entry point live. Nothing of a service is imported before it is asked for."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import typer

from tandem.settings import Settings, SettingsError, load_settings


@dataclass(frozen=True)
class Service:
    """A service that `tandem NAME` starts."""

    name: str
    package: str
    settings_class: str
    help: str

    def settings(self) -> type[Settings]:
        module = importlib.import_module(f"{self.package}.settings")
        return cast(type[Settings], getattr(module, self.settings_class))

    def run(self, settings: Settings) -> int:
        return int(importlib.import_module(f"{self.package}.main").run(settings))


SERVICES = {
    service.name: service
    for service in (
        Service("gateway", "gateway", "GatewaySettings", "Starts the HTTP gateway alone."),
        Service("router", "router", "RouterSettings", "Starts the router alone."),
        Service("engine", "engine_service", "EngineSettings", "Starts an engine alone."),
        Service("draft", "draft_service", "DraftSettings", "Starts a draft service alone."),
        Service("serve", "tandem.launcher", "ServeSettings", "Starts the whole stack on this machine."),
    )
}


def fail(message: str, code: int = 2) -> typer.Exit:
    """Prints a clear line to stderr; `raise fail(...)` ends the command."""
    print(f"tandem: {message}", file=sys.stderr)
    return typer.Exit(code)


def load_or_exit(cls: type[Settings], flags: dict[str, Any], config: Path | None) -> tuple[Settings, dict[str, str]]:
    try:
        return load_settings(cls, flags=flags, config=config)
    except SettingsError as error:
        raise fail(str(error)) from None


def start(service: Service, flags: dict[str, Any], config: Path | None) -> None:
    """Loads the settings, sets up logging and runs the service until it is told to stop."""
    from tandem import logs

    settings, _ = load_or_exit(service.settings(), flags, config)
    logs.setup(service.name, settings.log_level)
    raise typer.Exit(service.run(settings))
