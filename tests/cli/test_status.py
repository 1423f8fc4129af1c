"""`tandem status` and `tandem top`, before a fleet that the test sets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.cli import status, top
from tandem.cli.main import build_app
from tandem.fleet_view import fleet_dict, short_name, token_rates
from tandem.router.v1 import router_pb2 as rpb
from tests.gateway import admin_mock
from tests.gateway.conftest import LoopThread


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[admin_mock.MockAdmin, str]]:
    thread = LoopThread()
    server, mock, port = thread.run(admin_mock.start())
    yield mock, f"127.0.0.1:{port}"
    thread.run(server.stop(0))
    thread.stop()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(None), [*arguments])


def ready(name: str, **load: Any) -> rpb.EngineView:
    return admin_mock.engine(name, **load)


DOWN = rpb.EngineView(address="host:5", state=rpb.FLEET_STATE_DOWN, last_error="[refused]", consecutive_failures=4)


def test_all_is_well(served: tuple[admin_mock.MockAdmin, str]) -> None:
    mock, address = served
    mock.engines = [ready("engine-0", running=2, kv_blocks_used=50), ready("engine-1")]
    found = run("status", "--admin", address)
    assert found.exit_code == 0
    assert found.output.startswith("ok: 2 of 2 engines ready, 2 running, 3 waiting, 5 shed")
    assert "engine-0" in found.output and "50%" in found.output and "engine-1" in found.output


def test_degraded_down_and_min_ready(served: tuple[admin_mock.MockAdmin, str]) -> None:
    mock, address = served
    mock.engines = [ready("engine-0"), DOWN]
    found = run("status", "--admin", address)
    assert found.exit_code == 1 and "degraded: 1 of 2" in found.output
    # What stands in brackets is an error, not markup.
    assert "[refused]" in found.output
    assert run("status", "--admin", address, "--min-ready", "1").exit_code == 0
    mock.engines = [DOWN]
    assert run("status", "--admin", address, "--min-ready", "1").exit_code == 2
    mock.engines = []
    assert run("status", "--admin", address).exit_code == 2


def test_json_and_quiet(served: tuple[admin_mock.MockAdmin, str]) -> None:
    mock, address = served
    mock.engines = [ready("engine-0"), DOWN]
    found = run("status", "--admin", address, "--json")
    value = json.loads(found.output)
    assert found.exit_code == 1 and value["status"] == "degraded" and value["source"] == address
    assert [engine["state"] for engine in value["engines"]] == ["ready", "down"]
    quiet = run("status", "--admin", address, "--quiet")
    assert quiet.exit_code == 1 and quiet.output == ""


def test_nobody_answers() -> None:
    found = run("status", "--admin", "127.0.0.1:9")
    assert found.exit_code == 2 and "down: router at 127.0.0.1:9" in found.output
    found = run("status", "--url", "http://127.0.0.1:9", "--json")
    assert found.exit_code == 2 and json.loads(found.output)["status"] == "down"


def test_unclear_what_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "running_stacks", list)
    found = run("status")
    assert found.exit_code == 3 and "--admin" in found.output
    monkeypatch.setattr(status, "running_stacks", lambda: [{"url": "http://a"}, {"url": "http://b"}])
    found = run("status")
    assert found.exit_code == 3 and "http://a, http://b" in found.output
    assert run("status", "--url", "http://a", "--admin", "b:1").exit_code == 3
    assert run("status", "--admin", "nonsense").exit_code == 3
    assert run("top").exit_code == 3


def test_the_stack_that_runs_here(served: tuple[admin_mock.MockAdmin, str], monkeypatch: pytest.MonkeyPatch) -> None:
    mock, address = served
    mock.engines = [ready("engine-0")]
    monkeypatch.setattr(status, "running_stacks", lambda: [{"url": "http://a", "router_admin": address}])
    assert run("status").exit_code == 0


def test_token_rates_begin_anew_with_an_epoch() -> None:
    def fleet(*engines: rpb.EngineView) -> dict[str, Any]:
        return fleet_dict(rpb.ListEnginesResponse(engines=engines))

    before = fleet(ready("a", output_tokens=100), ready("b", output_tokens=500))
    restarted = ready("b", output_tokens=30)
    restarted.load.epoch = 99
    now = fleet(ready("a", output_tokens=160), restarted, ready("c", output_tokens=8), DOWN)
    rates = token_rates(now, before, 2.0)
    assert rates == {"unix:/run/a.sock": 30.0, "unix:/run/b.sock": 15.0, "unix:/run/c.sock": 4.0}
    assert short_name("unix:/run/a.sock") == "a" and short_name("host:1") == "host:1"


def test_quantiles_and_sparklines() -> None:
    values = [float(value) for value in range(1, 101)]
    assert top.quantile(values, 0.5) == 50 and top.quantile(values, 0.99) == 99 and top.quantile([], 0.5) is None
    assert top.quantile([7.0], 0.99) == 7.0
    assert top.sparkline([0, 1, 2]) == "▁▅█" and top.sparkline([0, 0]) == "▁▁" and top.sparkline([]) == ""


def test_top_shows_fleet_and_decisions(served: tuple[admin_mock.MockAdmin, str]) -> None:
    mock, address = served
    mock.engines = [ready("engine-0", output_tokens=5), DOWN]
    mock.decisions = [admin_mock.decision("r1")]

    def text(view: top.View, width: int = 200) -> str:
        console = Console(width=width)
        with console.capture() as captured:
            console.print(view.render(width))
        return captured.get()

    async def work() -> tuple[str, str, str, str]:
        source = status.open_source(None, address)
        view = top.View(source.name)
        first = text(view)
        await top.look(source, view)
        await top.look(source, view)
        shown, narrow = text(view), text(view, 80)
        await source.close()
        gone = status.open_source(None, "127.0.0.1:9")
        await top.look(gone, view)
        await gone.close()
        return first, shown, narrow, text(view)

    first, shown, narrow, stale = asyncio.run(work())
    assert "asking" in first
    assert "degraded" in shown and "engine-0" in shown and "holds 32 prompt tokens" in shown and "0 tok/s" in shown
    # Nothing is cut off on a narrow terminal: what has no room is left out.
    assert "engine-0" in narrow and "host:5: [refused]" in narrow and "…" not in narrow and "drafts ok" in narrow
    # What was seen last stays, and says how old it is.
    assert "s old" in stale and "engine-0" in stale
