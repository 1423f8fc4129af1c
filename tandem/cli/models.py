"""`tandem models pull|list|path`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.services import fail

if TYPE_CHECKING:
    from tandem.models.store import ResolvedModel


def resolve_or_exit(model: str) -> ResolvedModel:
    """Finds (and fetches) the model with a progress bar; a failure is one clear line."""
    from tandem.models import store

    try:
        return store.resolve(model)
    except store.ModelError as error:
        raise fail(str(error), 1) from None


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Fetches and lists models.", no_args_is_help=True)

    @group.callback()
    def _group() -> None:
        """Fetches and lists models."""

    @group.command("pull")
    def pull(model: Annotated[str, typer.Argument(help="name, folder, .gguf file or Hugging Face id")]) -> None:
        """Fetches a model into the cache, checks it, and prints where it lies."""
        found = resolve_or_exit(model)
        print(f"{found.name} ({found.kind}): {found.path}")

    @group.command("list")
    def list_() -> None:
        """Lists the models that are known by name and those in the cache."""
        from rich.console import Console
        from rich.table import Table

        from tandem.models import store

        table = Table("name", "size", "licence")
        table.add_column("path", overflow="fold")
        for item in store.list_models():
            size = f"{item.nbytes / 1e6:,.0f} MB" if item.nbytes else ""
            table.add_row(item.name, size, item.licence, str(item.path) if item.path else "not pulled")
        Console().print(table)

    @group.command("path")
    def path(model: Annotated[str, typer.Argument(help="name, folder, .gguf file or Hugging Face id")]) -> None:
        """Prints the model's path and nothing else; fetches it if need be."""
        print(resolve_or_exit(model).path)

    app.add_typer(group, name="models")
