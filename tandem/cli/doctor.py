"""`tandem doctor`: the checks of the set-up again, and what this installation can do."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tandem import __version__
from tandem.cli.preflight import Check, run_checks


def _compiler() -> Check:
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    return Check("compiler", True, found or "none: the C++ kernels can't be rebuilt here")


def _kernels() -> Check:
    try:
        built = bool(importlib.import_module("kernels.cpu").available())
    except (ImportError, AttributeError, OSError) as error:
        return Check("kernels", False, f"unusable: {error}", "C++ kernels", "python -m kernels.cpu.build")
    if built:
        return Check("kernels", True, "C++ kernels are built")
    return Check("kernels", True, "not built: the slower torch path is used (python -m kernels.cpu.build)")


def _stubs() -> Check:
    try:
        importlib.import_module("tandem.inference.v1.inference_pb2_grpc")
    except ImportError as error:
        return Check("stubs", False, str(error), "generated gRPC stubs", "make protos")
    return Check("stubs", True, "gRPC stubs are generated")


def _model() -> Check:
    from tandem.models import store

    for item in store.list_models():
        if item.name == store.DEFAULT_MODEL and item.path is not None:
            return Check("model", True, f"{item.name} at {item.path}")
    mend = f"tandem models pull {store.DEFAULT_MODEL}"
    return Check("model", True, f"{store.DEFAULT_MODEL} is not in the cache; the first start fetches it ({mend})")


def register(app: typer.Typer) -> None:
    @app.command("doctor")
    def doctor(
        port: Annotated[int, typer.Option(help="port that `tandem serve` would take")] = 8000,
        host: Annotated[str, typer.Option(help="address that it would bind")] = "127.0.0.1",
        network: Annotated[bool, typer.Option(help="Also ask the package index.")] = False,
    ) -> None:
        """Checks this machine and this installation. Each problem is one line with the command that mends it."""
        print(f"tandem {__version__}")
        checks = run_checks(port, installed=not network, venv=Path.cwd(), host=host)
        checks += [_stubs(), _compiler(), _kernels(), _model()]
        for check in checks:
            print(("ok    " if check.ok else "FAIL  ") + check.line())
        if not all(check.ok for check in checks):
            raise typer.Exit(2)
