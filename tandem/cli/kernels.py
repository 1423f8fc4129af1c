"""`tandem kernels list|check|bench`: which kernel runs what here, whether it is right, how fast it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from tandem.cli.services import fail

Device = Annotated[str | None, typer.Option(help="cpu, cuda or interpreter; default: what this machine has")]


def _show(rows: Callable[[], Any]) -> Any:
    """Prints the rows as a table and returns them; a machine that cannot is one clear line."""
    from kernels import report

    try:
        found = rows()
    except (RuntimeError, ValueError) as error:
        raise fail(str(error), 1) from None
    print(report.render(found))
    return found


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Looks at the kernels.", no_args_is_help=True)

    @group.callback()
    def _group() -> None:
        """Looks at the kernels."""

    @group.command("list")
    def list_(
        device: Device = None,
        target: Annotated[str | None, typer.Option(help="GPU architecture, such as sm_90 or gfx942")] = None,
    ) -> None:
        """Shows which implementation each operation takes, and why."""
        from kernels import report

        _show(lambda: report.list_kernels(device, target))

    @group.command("check")
    def check(
        device: Device = None,
        seed: Annotated[int | None, typer.Option(help="of the random inputs; default: new")] = None,
    ) -> None:
        """Compares each kernel with the reference on fresh inputs. Exit 1 if one is wrong."""
        from kernels import report

        rows = _show(lambda: report.check_kernels(device, seed))
        if not all(row.passed for row in rows):
            raise typer.Exit(1)

    @group.command("bench")
    def bench(device: Device = None) -> None:
        """Measures the main kernels at serving shapes."""
        from kernels import report

        _show(lambda: report.bench_kernels(device))

    app.add_typer(group, name="kernels")
