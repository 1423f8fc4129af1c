"""`tandem systemd`: writes, shows and removes systemd units."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.services import fail
from tandem.cli.units import HEADER, Plan, units

_PROGRAM = "the tandem command; default: the one that runs"


def program_path() -> str:
    """Absolute path of the command that runs."""
    here = Path(sys.argv[0])
    if here.name != "tandem":
        here = Path(sys.executable).parent / "tandem"
    found = str(here.absolute()) if here.exists() else shutil.which("tandem")
    if not found:
        raise fail("the tandem command is not found: name it with --program", 1)
    return found


def unit_folder(user: bool) -> Path:
    if not user:
        return Path("/etc/systemd/system")
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "systemd" / "user"


def write(folder: Path, made: dict[str, str]) -> list[str]:
    """Writes units; returns the names of those that changed. Refuses to replace a file that is not ours.

    Raises:
        OSError: the folder cannot be written, or a file there was made by somebody else.
    """
    changed = []
    for name, text in made.items():
        path = folder / name
        old = path.read_text() if path.exists() else ""
        if old and not old.startswith(HEADER):
            raise OSError(f"{path} was not made by tandem: move it away first")
        if old != text:
            changed.append(name)
    folder.mkdir(parents=True, exist_ok=True)
    for name in changed:
        (folder / name).write_text(made[name])
    return changed


def remove(folder: Path) -> list[str]:
    """Removes units that `write` made; returns their names."""
    gone = []
    for path in sorted(folder.glob("tandem*")):
        if path.is_file() and path.read_text().startswith(HEADER):
            path.unlink()
            gone.append(path.name)
    return gone


def _plan(program: str | None, engines: int, port: int, user: bool) -> Plan:
    try:
        return Plan(program or program_path(), engines, port, user)
    except ValueError as error:
        raise fail(str(error)) from None


def _systemctl(user: bool, *words: str) -> str:
    return " ".join(("systemctl", *(("--user",) if user else ()), *words))


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Starts the stack at boot with systemd.", no_args_is_help=True)

    @group.callback()
    def _group() -> None:
        """Starts the stack at boot with systemd."""

    @group.command("install")
    def install(
        user: Annotated[bool, typer.Option("--user", help="For this user's own manager.")] = False,
        engines: Annotated[int, typer.Option(help="engines, each with its own draft")] = 1,
        port: Annotated[int, typer.Option(help="port of the gateway, on loopback")] = 8000,
        program: Annotated[str | None, typer.Option(help=_PROGRAM)] = None,
        directory: Annotated[Path | None, typer.Option(help="folder for the units; default: systemd's own")] = None,
    ) -> None:
        """Writes the units and says what to run next. Starts nothing."""
        plan = _plan(program, engines, port, user)
        if not os.access(plan.program, os.X_OK):
            raise fail(f"{plan.program} is no program that can be run")
        if not user and plan.program.startswith(("/root/", "/home/")):
            print(f"tandem: the units' user may not reach {plan.program}: install into /opt", file=sys.stderr)
        folder = directory or unit_folder(user)
        try:
            changed = write(folder, units(plan))
        except OSError as error:
            hint = " (as root, or with --user)" if isinstance(error, PermissionError) else ""
            raise fail(f"{error}{hint}", 1) from None
        print(f"{folder}: {', '.join(changed) if changed else 'nothing to change'}")
        print(f"next: {_systemctl(user, 'daemon-reload')} && {_systemctl(user, 'enable', '--now', 'tandem.target')}")
        if user:
            print("to start without a login: loginctl enable-linger")

    @group.command("show")
    def show(
        user: Annotated[bool, typer.Option("--user", help="For this user's own manager.")] = False,
        engines: Annotated[int, typer.Option(help="engines, each with its own draft")] = 1,
        port: Annotated[int, typer.Option(help="port of the gateway, on loopback")] = 8000,
        program: Annotated[str | None, typer.Option(help=_PROGRAM)] = None,
    ) -> None:
        """Prints the units."""
        for name, text in units(_plan(program, engines, port, user)).items():
            print(f"# ---- {name}\n{text}")

    @group.command("uninstall")
    def uninstall(
        user: Annotated[bool, typer.Option("--user", help="For this user's own manager.")] = False,
        directory: Annotated[Path | None, typer.Option(help="folder of the units; default: systemd's own")] = None,
    ) -> None:
        """Removes the units that install has written. Stop them first."""
        folder = directory or unit_folder(user)
        try:
            gone = remove(folder)
        except OSError as error:
            raise fail(str(error), 1) from None
        print(f"{folder}: removed {', '.join(gone)}" if gone else f"{folder}: nothing of ours")

    app.add_typer(group, name="systemd")
