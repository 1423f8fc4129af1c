"""`tandem status`: one look at the fleet, with an exit code that monitoring tools understand."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.admin import running_stacks
from tandem.cli.fleet_source import AdminSource, GatewaySource, Source, UnreachableError
from tandem.cli.services import fail

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

OK, DEGRADED, DOWN, UNKNOWN = 0, 1, 2, 3
WORDS = {OK: "ok", DEGRADED: "degraded", DOWN: "down", UNKNOWN: "unknown"}
_COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow"}


@dataclass(frozen=True)
class Verdict:
    """What the fleet's state means."""

    code: int
    summary: str

    @property
    def word(self) -> str:
        return WORDS[self.code]


def judge(fleet: dict[str, Any], min_ready: int | None = None) -> Verdict:
    """Whether a fleet is as it should be: all engines ready, or at least `min_ready`."""
    engines = fleet["engines"]
    ready = sum(engine["state"] == "ready" for engine in engines)
    wanted = len(engines) if min_ready is None else min_ready
    summary = f"{ready} of {len(engines)} engines ready"
    running = sum(engine["running"] or 0 for engine in engines)
    waiting = sum(engine["waiting"] or 0 for engine in engines) + fleet["queued"]
    summary += f", {running} running, {waiting} waiting, {fleet['shed']} shed since start"
    if ready == 0:
        return Verdict(DOWN, summary)
    return Verdict(OK if ready >= wanted else DEGRADED, summary)


def open_source(url: str | None, admin: str | None) -> Source:
    """The source that the options name, or the stack that runs here. Ends the command with 3 if that is unclear."""
    if url and admin:
        raise fail("--url and --admin exclude each other", UNKNOWN)
    try:
        if admin:
            return AdminSource(admin)
    except ValueError as error:
        raise fail(f"--admin: {error}", UNKNOWN) from None
    if url:
        return GatewaySource(url)
    stacks = running_stacks()
    if len(stacks) != 1:
        urls = ", ".join(sorted(str(state["url"]) for state in stacks))
        what = f"several run here ({urls})" if stacks else "no `tandem serve` of this user runs here"
        raise fail(f"{what}: name one by --url or --admin", UNKNOWN)
    return AdminSource(stacks[0]["router_admin"])


def share(value: float | None) -> str:
    """A share as per cent; a dash where nothing was measured."""
    return "–" if value is None else f"{value * 100:.0f}%"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


# Columns that a narrow terminal does without.
_WIDE_ONLY = frozenset({"model", "memory", "epoch", "numerics", "last error"})
WIDE = 120


def engine_row(engine: dict[str, Any], rates: dict[str, float] | None) -> dict[str, str | Text]:
    """An engine's cells by column."""
    from rich.text import Text

    state = engine["state"] + (f" ({engine['consecutive_failures']} failed)" if engine["breaker"] == "open" else "")
    row: dict[str, str | Text] = {
        "engine": engine["name"],
        "state": Text(state, style=_COLOURS.get(engine["state"], "red")),
        "model": engine["model"] or "–",
        "running": _count(engine["running"]),
        "waiting": _count(engine["waiting"]),
        "KV": share(engine["kv_use"]),
        "hits": share(engine["hit_rate"]),
        "drafts ok": share(engine["acceptance"]),
    }
    if rates is not None:
        row["tok/s"] = f"{rates[engine['address']]:.0f}" if engine["address"] in rates else "–"
    row["memory"] = "–" if engine["rss_bytes"] is None else f"{engine['rss_bytes'] / 1e6:,.0f} MB"
    row["epoch"] = (engine["epoch"] or "–")[:8]
    row["numerics"] = (engine["numerics_id"] or "–")[:12]
    # Text, so that brackets in an error are no markup.
    row["last error"] = Text(engine["last_error"])
    return row


def engine_table(fleet: dict[str, Any], rates: dict[str, float] | None = None, wide: bool = True) -> Table:
    """One row per engine; with `rates` (tokens per second by address) a column for them."""
    from rich.table import Table

    rows = [engine_row(engine, rates) for engine in fleet["engines"]]
    names = [name for name in (rows[0] if rows else ()) if wide or name not in _WIDE_ONLY]
    left = _WIDE_ONLY - {"memory"} | {"engine", "state"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name != "last error")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _print(source: Source, fleet: dict[str, Any], verdict: Verdict) -> None:
    from rich.console import Console

    print(f"{verdict.word}: {verdict.summary}  [{source.name}]")
    if fleet["engines"]:
        # A pipe gets whole lines, not lines cut at 80 columns.
        Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200).print(engine_table(fleet))


async def _look(source: Source) -> dict[str, Any]:
    try:
        return await source.fleet()
    finally:
        await source.close()


def register(app: typer.Typer) -> None:
    @app.command("status")
    def status(
        url: Annotated[str | None, typer.Option(help="gateway to ask; TANDEM_API_KEY is its key")] = None,
        admin: Annotated[str | None, typer.Option(help="router's admin address; default: the stack here")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing; the exit code tells.")] = False,
        min_ready: Annotated[int | None, typer.Option(min=1, help="engines that must be ready; default: all")] = None,
    ) -> None:
        """Shows the fleet once. Exits 0 if all is well, 1 if engines are missing, 2 if none serves, 3 if unclear."""

        async def work() -> tuple[Source, dict[str, Any]]:
            source = open_source(url, admin)
            return source, await _look(source)

        try:
            source, fleet = asyncio.run(work())
        except UnreachableError as error:
            if as_json and not quiet:
                print(json.dumps({"status": WORDS[DOWN], "error": str(error)}))
            raise (typer.Exit(DOWN) if as_json or quiet else fail(f"down: {error}", DOWN)) from None
        verdict = judge(fleet, min_ready)
        if as_json and not quiet:
            print(json.dumps({"status": verdict.word, "summary": verdict.summary, "source": source.name, **fleet}))
        elif not quiet:
            _print(source, fleet, verdict)
        raise typer.Exit(verdict.code)
