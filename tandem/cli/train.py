"""`tandem draft train …`: distils a draft model from a target. The work is the draft service's."""

from __future__ import annotations

import importlib.util

import typer

from tandem.cli.services import fail


def register(app: typer.Typer) -> None:
    @app.command(
        "train", context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    )
    def train(ctx: typer.Context) -> None:
        """Trains a draft for a target model on this machine ."""
        if importlib.util.find_spec("draft_service.training") is None:
            raise fail("draft training is not part of this version")
        from draft_service.training import main  # type: ignore[import-not-found]

        raise typer.Exit(int(main(list(ctx.args)) or 0))
