"""`tandem top`: the fleet in a terminal, live."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.fleet_source import Source, UnreachableError
from tandem.cli.services import fail
from tandem.cli.status import UNKNOWN, WIDE, engine_table, judge, open_source
from tandem.fleet_view import token_rates

if TYPE_CHECKING:
    from rich.console import RenderableType

DECISIONS = 200
SHOWN_DECISIONS = 8
# Time to the first token is told over the decisions of so many seconds.
WINDOW_S = 60.0
_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 60


def quantile(values: Sequence[float], q: float) -> float | None:
    """The value at rank ceil(q·n); None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1)]


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of bars, the greatest as high as a line."""
    top = max(values, default=0.0)
    if top <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in values)


@dataclass
class View:
    """What was seen so far."""

    source: str
    fleet: dict[str, Any] | None = None
    decisions: list[dict[str, Any]] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    shed_per_s: float = 0.0
    speeds: list[float] = field(default_factory=list)
    error: str = ""
    at: float = 0.0

    def take(self, fleet: dict[str, Any], decisions: list[dict[str, Any]], now: float) -> None:
        """Adds a look at the fleet; `now` is a monotonic time in seconds."""
        if self.fleet is not None:
            seconds = max(1e-3, now - self.at)
            self.rates = token_rates(fleet, self.fleet, seconds)
            self.shed_per_s = max(0, fleet["shed"] - self.fleet["shed"]) / seconds
            self.speeds = [*self.speeds, sum(self.rates.values())][-_HISTORY:]
        self.fleet, self.decisions, self.at, self.error = fleet, decisions, now, ""

    def _latency(self) -> str:
        since = (time.time() - WINDOW_S) * 1000
        values = [one["ttft_ms"] for one in self.decisions if one["ttft_ms"] is not None and one["unix_ms"] >= since]
        half, most = quantile(values, 0.5), quantile(values, 0.99)
        if half is None or most is None:
            return "first token –"
        return f"first token p50 {half:.0f} ms, p99 {most:.0f} ms"

    def render(self, width: int) -> RenderableType:
        """Everything as one thing to print on a terminal of so many columns."""
        from rich.console import Group
        from rich.text import Text

        wide = width >= WIDE

        if self.fleet is None:
            return Text(f"{self.source}: {self.error or 'asking…'}", style="red" if self.error else "")
        verdict = judge(self.fleet)
        colour = {"ok": "green", "degraded": "yellow"}.get(verdict.word, "red")
        head = Text.assemble((verdict.word, f"bold {colour}"), f"  {verdict.summary}  ({self.source})")
        if self.error:
            head.append(f"\n{self.error}; what follows is {time.monotonic() - self.at:.0f} s old", style="red")
        speed = f"{self.speeds[-1]:.0f} tok/s" if self.speeds else "– tok/s"
        line = Text(f"{speed} {sparkline(self.speeds)}  {self._latency()}  shed {self.shed_per_s:.1f}/s")
        parts: list[RenderableType] = [head, line, Text(), engine_table(self.fleet, self.rates, wide)]
        if not wide:
            errors = [engine for engine in self.fleet["engines"] if engine["last_error"]]
            parts += [Text(f"{engine['name']}: {engine['last_error']}", style="red") for engine in errors]
        return Group(*parts, Text(), self._decisions(wide))

    def _decisions(self, wide: bool) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold", title="last decisions", title_justify="left")
        for name in ("time", "engine"):
            table.add_column(name, no_wrap=True)
        for name in ("prompt", "cached", "queued", "first token"):
            table.add_column(name, no_wrap=True, justify="right")
        for name in ("outcome", "why") if wide else ("outcome",):
            table.add_column(name, no_wrap=True)
        for one in reversed(self.decisions[-SHOWN_DECISIONS:]):
            table.add_row(
                time.strftime("%H:%M:%S", time.localtime(one["unix_ms"] / 1000)),
                one["name"] or "nobody",
                str(one["prompt_tokens"]),
                "–" if one["cached_tokens"] is None else str(one["cached_tokens"]),
                f"{one['queued_ms']:.0f} ms",
                "–" if one["ttft_ms"] is None else f"{one['ttft_ms']:.0f} ms",
                one["outcome"] or "running",
                *([Text(one["reason"])] if wide else []),
            )
        return table


async def look(source: Source, view: View) -> None:
    """Asks once; an error is kept in the view."""
    try:
        fleet, decisions = await asyncio.gather(source.fleet(), source.routes(DECISIONS))
    except UnreachableError as error:
        view.error = str(error)
    else:
        view.take(fleet, decisions, time.monotonic())


async def _run(url: str | None, admin: str | None, every_s: float) -> None:
    from rich.live import Live

    source = open_source(url, admin)
    view = View(source.name)
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                await look(source, view)
                live.update(view.render(live.console.width), refresh=True)
                await asyncio.sleep(every_s)
    finally:
        await source.close()


def register(app: typer.Typer) -> None:
    @app.command("top")
    def top(
        url: Annotated[str | None, typer.Option(help="gateway to ask; TANDEM_API_KEY is its key")] = None,
        admin: Annotated[str | None, typer.Option(help="router's admin address; default: the stack here")] = None,
        every: Annotated[float, typer.Option(min=0.2, max=60, help="seconds between two looks")] = 1.0,
    ) -> None:
        """Shows the fleet live, until Ctrl-C."""
        if not sys.stdout.isatty():
            raise fail("top needs a terminal; for scripts there is `tandem status --json`", UNKNOWN)
        try:
            asyncio.run(_run(url, admin, every))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
