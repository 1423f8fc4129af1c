"""`tandem serve`: checks, fetches the model once, starts everything, tells, watches, stops everything."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem import logs
from tandem.cli.preflight import check_port
from tandem.cli.services import fail, load_or_exit
from tandem.launcher.child import Child
from tandem.launcher.passing import split
from tandem.launcher.plan import ModelPlace, Plan, make_plan
from tandem.launcher.settings import ServeSettings
from tandem.launcher.supervisor import Supervisor
from tandem.launcher.watchdog import Watchdog
from tandem.machine import usable_cores
from tandem.settings import SettingsError

log = logging.getLogger(__name__)

STATE_FILE = "state.json"


def serve_command(flags: dict[str, Any], config: Path | None) -> int:
    """Runs the whole stack; returns the exit code."""
    own, passed = split(flags)
    settings, _ = load_or_exit(ServeSettings, own, config)
    assert isinstance(settings, ServeSettings)
    logs.setup("serve", settings.log_level)
    port = check_port(settings.port, settings.host)
    if not port.ok:
        raise fail(port.line())
    if config is None and os.environ.get("TANDEM_CONFIG"):
        config = Path(os.environ["TANDEM_CONFIG"])
    try:
        model = _resolve(settings.model)
        run_dir = _run_dir(settings)
    except KeyboardInterrupt:
        return 130
    watchdog = Watchdog(run_dir)
    try:
        plan = make_plan(settings, passed, model, run_dir, config, dict(os.environ), usable_cores())
        return asyncio.run(_serve(plan, settings, watchdog, run_dir))
    except (SettingsError, ValueError) as error:
        raise fail(str(error)) from None
    finally:
        watchdog.close()


def _resolve(model: str) -> ModelPlace:
    """Fetches the model once, before any child starts."""
    from tandem.models import store

    try:
        found = store.resolve(model)
    except store.ModelError as error:
        raise fail(f"--model {model}: {error}", 1) from None
    return ModelPlace(found.path, found.name)


def _run_dir(settings: ServeSettings) -> Path:
    """A short, private folder for the sockets: socket paths have about a hundred bytes."""
    if settings.run_dir is None:
        base = "/tmp" if os.access("/tmp", os.W_OK) else None
        return Path(tempfile.mkdtemp(prefix="tandem-", dir=base))
    try:
        # A new one only: at the end the whole folder goes.
        settings.run_dir.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise fail(f"--run-dir {settings.run_dir}: {error.strerror}; it must be a folder that does not exist") from None
    return settings.run_dir


def write_state(plan: Plan, run_dir: Path, children: Sequence[Child]) -> None:
    """Tells other commands on this machine (tandem drain, tandem routes) where things are."""
    state = {
        "pid": os.getpid(),
        "url": plan.url,
        "router": plan.router,
        "router_admin": plan.router_admin,
        "children": [
            {"name": c.spec.name, "service": c.spec.service, "address": c.spec.address, "pid": c.pid} for c in children
        ],
    }
    (run_dir / STATE_FILE).write_text(json.dumps(state, indent=1))


async def _serve(plan: Plan, settings: ServeSettings, watchdog: Watchdog, run_dir: Path) -> int:
    supervisor = Supervisor(plan, watchdog, settings.ready_timeout_s)
    write_state(plan, run_dir, supervisor.children)

    async def on_ready(children: Sequence[Child]) -> None:
        from rich.console import Console

        from tandem.launcher.report import print_report

        write_state(plan, run_dir, children)
        # A pipe gets whole lines, not lines cut at 80 columns.
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
        await print_report(plan, children, console)

    if sys.stderr.isatty():
        plan.environment["TANDEM_LOG_STYLE"] = "terminal"
    return await supervisor.run(on_ready)
