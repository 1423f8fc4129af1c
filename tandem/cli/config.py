"""`tandem config show`: each setting's value and where it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli import services
from tandem.cli.flags import is_secret
from tandem.settings import Settings


def _shown(settings: Settings, name: str) -> Any:
    value = getattr(settings, name)
    if is_secret(type(settings).model_fields[name]):
        return "********" if value else None
    return value


def rows(names: list[str], config: Path | None) -> list[tuple[str, str, Any, str]]:
    """(service, setting, value, origin), secrets redacted."""
    found = []
    for name in names:
        settings, origins = services.load_or_exit(services.SERVICES[name].settings(), {}, config)
        found += [(name, field, _shown(settings, field), origins[field]) for field in type(settings).model_fields]
    return found


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Looks at settings.", no_args_is_help=True)

    @group.callback()
    def _group() -> None:
        """Looks at settings."""

    @group.command("show")
    def show(
        service: Annotated[str | None, typer.Argument(help="gateway, router, engine, draft or serve")] = None,
        config: Annotated[Path | None, typer.Option("--config", help="TOML file (env: TANDEM_CONFIG)")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Prints each value and its origin: environment, file or default. Secrets are redacted."""
        if service is not None and service not in services.SERVICES:
            raise services.fail(f"{service!r} is no service; known: {', '.join(services.SERVICES)}")
        found = rows([service] if service else list(services.SERVICES), config)
        if as_json:
            keys = ("service", "setting", "value", "origin")
            print(json.dumps([dict(zip(keys, row, strict=True)) for row in found], default=str, indent=2))
            return
        from rich.console import Console
        from rich.table import Table

        table = Table("service", "setting", "value", "origin")
        for name, field, value, origin in found:
            table.add_row(name, field, "" if value is None else str(value), origin)
        Console().print(table)

    app.add_typer(group, name="config")
