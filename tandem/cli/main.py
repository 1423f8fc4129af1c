"""The `tandem` command. Only what the command at hand needs is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem import __version__
from tandem.cli import services
from tandem.cli.flags import Flag, command, settings_flags


def _version(value: bool) -> None:
    if value:
        print(f"tandem {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Tandem serves large language models: a gateway, a router, engines, and a draft for each."""


def _service_flags(name: str) -> list[Flag]:
    service = services.SERVICES[name]
    if name != "serve":
        return settings_flags(service.settings())
    from tandem.launcher.passing import serve_flags

    return serve_flags()


def _add_service(app: typer.Typer, name: str, full: bool) -> None:
    """Registers a service's command; its settings are imported only if it is the command that was asked for."""
    service = services.SERVICES[name]

    def body(flags: dict[str, Any], config: Path | None) -> None:
        if name == "serve":
            from tandem.launcher.main import serve_command

            raise typer.Exit(serve_command(flags, config))
        services.start(service, flags, config)

    if name == "draft":
        from tandem.cli import train

        group = typer.Typer(invoke_without_command=True, help=service.help, rich_markup_mode=None)
        group.callback()(command(_service_flags(name) if full else [], body, service.help, context=True))
        train.register(group)
        app.add_typer(group, name=name)
        return
    app.command(name, help=service.help)(command(_service_flags(name) if full else [], body, service.help))


def build_app(asked: str | None) -> typer.Typer:
    """The whole command tree; only the service command named `asked` gets its flags."""
    from tandem.cli import admin, chat, config, doctor, kernels, models, run_batch, status, systemd, top

    app = typer.Typer(
        name="tandem", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=_root.__doc__
    )
    app.callback()(_root)
    for name in ("serve", "gateway", "router", "engine", "draft"):
        _add_service(app, name, full=asked == name)
    for module in (chat, models, doctor, config, kernels, admin, status, top, run_batch, systemd):
        module.register(app)
    return app


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script."""
    arguments = sys.argv[1:] if argv is None else argv
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    build_app(asked)(args=arguments, prog_name="tandem")


if __name__ == "__main__":
    main()
