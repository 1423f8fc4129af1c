"""Commands that look into or steer running services: drain, routes, health."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.fleet_source import service_metadata
from tandem.cli.services import fail

if TYPE_CHECKING:
    import grpc

    from tandem.router.v1 import router_pb2


def running_stacks() -> list[dict[str, Any]]:
    """State files of the launchers that run on this machine under this user."""
    found = []
    for base in {Path("/tmp"), Path(tempfile.gettempdir())}:
        for path in base.glob("tandem-*/state.json"):
            try:
                if path.stat().st_uid != os.getuid():
                    continue
                state = json.loads(path.read_text())
                os.kill(state["pid"], 0)
            except (OSError, ValueError, KeyError):
                continue
            found.append(state)
    return found


def the_stack(url: str | None = None) -> dict[str, Any]:
    """The one stack that runs here, or the one at `url`. Ends the command if that is not clear."""
    stacks = [state for state in running_stacks() if url is None or state["url"] == url]
    if not stacks:
        raise fail("no `tandem serve` of this user runs here; name an address (see --help)", 1)
    if len(stacks) > 1:
        urls = ", ".join(sorted(str(state["url"]) for state in stacks))
        raise fail(f"several run here ({urls}): name an address (see --help)", 1)
    return stacks[0]


def engine_address(name: str) -> str:
    """An address as it is; a name such as engine-0 is looked up in the stack that runs here."""
    if name.startswith("unix:") or ":" in name:
        return name
    children = the_stack()["children"]
    for child in children:
        if child["service"] == "engine" and child["name"] == name:
            return str(child["address"])
    names = ", ".join(child["name"] for child in children if child["service"] == "engine")
    raise fail(f"{name!r} is neither an address nor an engine that runs here ({names})", 1)


def _call(work: Any) -> Any:
    """Runs one coroutine; an RPC error becomes one line."""
    import grpc

    try:
        return asyncio.run(work)
    except grpc.aio.AioRpcError as error:
        raise fail(f"{error.code().name}: {error.details()}", 1) from None
    except ValueError as error:
        raise fail(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def _drain(address: str, grace_ms: int, cancel: bool, wait: bool) -> None:
    from tandem import rpc
    from tandem.engine.v1 import engine_pb2, engine_pb2_grpc

    channel = rpc.channel(address)
    try:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        while True:
            answer = await stub.Drain(engine_pb2.DrainRequest(grace_ms=grace_ms, cancel=cancel), timeout=10)
            state = engine_pb2.EngineState.Name(answer.state).removeprefix("ENGINE_STATE_").lower()
            print(f"{address}: {state}, {answer.remaining} requests left")
            if cancel or not wait or answer.remaining == 0:
                return
            await asyncio.sleep(0.5)
    finally:
        await channel.close()


def decision_line(decision: router_pb2.RouteDecision) -> str:
    """One decision for people."""
    parts = [f"{decision.request_id or '-'}", f"→ {decision.chosen or 'nobody'}", decision.policy, decision.reason]
    parts.append(f"prompt {decision.prompt_tokens}")
    if decision.HasField("actual_cached_tokens"):
        parts.append(f"cached {decision.actual_cached_tokens}")
    if decision.HasField("ttft_ms"):
        parts.append(f"ttft {decision.ttft_ms:.0f} ms")
    parts.append(f"queued {decision.queued_ms:.0f} ms")
    if decision.attempt > 1:
        parts.append(f"attempt {decision.attempt}")
    parts.append(decision.outcome or "running")
    return "  ".join(part for part in parts if part)


async def _watch(channel: grpc.aio.Channel, last: int, follow: bool, as_json: bool) -> None:
    from google.protobuf.json_format import MessageToDict

    from tandem.router.v1 import router_pb2, router_pb2_grpc

    try:
        stub = router_pb2_grpc.RouterAdminServiceStub(channel)
        request = router_pb2.WatchRoutesRequest(last=last, follow=follow)
        async for answer in stub.WatchRoutes(request, metadata=service_metadata()):
            for decision in answer.decisions:
                if as_json:
                    print(json.dumps(MessageToDict(decision, preserving_proto_field_name=True)), flush=True)
                else:
                    print(decision_line(decision), flush=True)
    finally:
        await channel.close()


def _routes(app: typer.Typer) -> None:
    group = typer.Typer(help="Looks at the router's decisions.", no_args_is_help=True)

    @group.callback()
    def _group() -> None:
        """Looks at the router's decisions."""

    @group.command("tail")
    def tail(
        admin: Annotated[str | None, typer.Option(help="router's admin address; default: the stack here")] = None,
        last: Annotated[int, typer.Option(min=0, max=1000, help="old decisions to show first")] = 20,
        follow: Annotated[bool, typer.Option(help="Go on with new ones.")] = True,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    ) -> None:
        """Shows the last routing decisions, then new ones as they are made."""
        from tandem import rpc

        address = admin or the_stack()["router_admin"]

        async def work() -> None:
            await _watch(rpc.channel(address), last, follow, as_json)

        _call(work())

    app.add_typer(group, name="routes")


def register(app: typer.Typer) -> None:
    @app.command("drain")
    def drain(
        engine: Annotated[str, typer.Argument(help="engine-0 of the stack here, or an address")],
        grace: Annotated[float, typer.Option(help="seconds that requests may still take; 0: engine's own")] = 0.0,
        cancel: Annotated[bool, typer.Option("--cancel", help="Go back to work instead.")] = False,
        wait: Annotated[bool, typer.Option(help="Wait until nothing is left.")] = True,
    ) -> None:
        """Makes an engine finish what it has and take nothing new."""
        _call(_drain(engine_address(engine), int(grace * 1000), cancel, wait))

    _routes(app)

    @app.command("health")
    def health(
        address: Annotated[str, typer.Argument(help="host:port, unix:/path, or http://host:port of a gateway")],
        ready: Annotated[bool, typer.Option("--ready", help="Of a gateway: whether an engine can serve.")] = False,
    ) -> None:
        """Exits 0 if the service at an address serves, else 1. For health checks."""
        from tandem.launcher.ready import Probe

        async def ask() -> bool:
            probe = Probe(address)
            try:
                return await (probe.ready() if ready else probe.alive())
            finally:
                await probe.close()

        if not _call(ask()):
            raise fail(f"{address} does not serve", 1)
        print(f"{address} serves")
