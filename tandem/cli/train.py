"""`tandem draft train …`: distils a draft model from a target. The work is the draft service's."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    @app.command(
        "train", context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    )
    def train(ctx: typer.Context) -> None:
        """Trains a draft for a target model on this machine ."""
        from draft_service.training.main import main

        raise typer.Exit(int(main(list(ctx.args)) or 0))
