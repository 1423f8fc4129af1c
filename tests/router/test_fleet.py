"""Discovery, states, outliers, several models, and the admin view."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.simulation import traces
from benchmarks.simulation.engine import MODELS
from benchmarks.simulation.world import SimConfig, World
from router.discovery import Discovery, DnsName, parse_engines
from router.server import RouterServer
from router.settings import RouterSettings
from tandem import rpc
from tandem.cli.fleet_source import AdminSource, UnreachableError
from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tandem.inference.v1 import inference_pb2_grpc
from tandem.router.v1 import router_pb2 as rpb
from tandem.router.v1 import router_pb2_grpc
from tests.router.harness import cluster, collect, request, router_for, until
from tests.router.mock_engine import MockConfig, MockEngine

PROMPT = list(range(100))
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def test_engines_setting() -> None:
    assert parse_engines("a:1, unix:/tmp/x ,dns:engine:50, a:1,") == (["a:1", "unix:/tmp/x"], [DnsName("engine", 50)])
    for bad in ("nonsense", "dns:engine", "dns::5", "host:port", "dns:e:99999999"):
        with pytest.raises(ValueError, match=bad.rpartition(":")[2]):
            parse_engines(bad)
        with pytest.raises(ValueError):
            RouterSettings(engines=bad)


async def test_dns_names_give_all_addresses_and_survive_an_outage() -> None:
    answers: list[list[str] | OSError] = [["10.0.0.1:5", "10.0.0.2:5"], OSError("down"), ["10.0.0.2:5"]]

    async def resolver(host: str, port: int) -> list[str]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    discovery = Discovery("fix:1,dns:engine:5", 1.0, resolver)
    assert await discovery.addresses() == {"fix:1", "10.0.0.1:5", "10.0.0.2:5"}
    assert await discovery.addresses() == {"fix:1", "10.0.0.1:5", "10.0.0.2:5"}
    assert await discovery.addresses() == {"fix:1", "10.0.0.2:5"}


async def test_real_name_resolves() -> None:
    found = await Discovery("dns:localhost:77", 1.0).addresses()
    assert "127.0.0.1:77" in found


async def test_engines_come_and_go_by_dns() -> None:
    engines = [await MockEngine("127.0.0.1:0", MockConfig(step_s=0.01)).start() for _ in range(2)]
    listed = [engines[0].address]

    async def resolver(host: str, port: int) -> list[str]:
        return list(listed)

    from router.server import RouterServer
    from tandem import rpc

    settings = RouterSettings(
        listen="127.0.0.1:0", admin_listen="", engines="dns:e:1", resolve_interval_s=0.05, load_interval_ms=50
    )
    router = RouterServer(settings, resolver=resolver)
    await router.start()
    try:
        async with rpc.channel(router.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await until(lambda: len(router.fleet.usable("mock")) == 1)
            listed.append(engines[1].address)
            await until(lambda: len(router.fleet.usable("mock")) == 2)
            running = asyncio.create_task(collect(stub, request(PROMPT, 60)))
            await until(lambda: any(engine.running for engine in engines))
            used = next(engine for engine in engines if engine.running)
            listed.remove(used.address)
            await until(lambda: len(router.fleet.usable("mock")) == 1)
            assert len((await running).ids[0]) == 60, "what runs there may finish"
            assert len(used.calls) == 1
            await until(lambda: used.address not in router.fleet.engines)
    finally:
        await router.stop(0)
        for engine in engines:
            await engine.stop()


async def test_outlier_is_ejected_then_probed() -> None:
    async with cluster(2, policy="round_robin", eject_s=1.0) as c:
        bad = c.engines[0]
        bad.config.refuse = [TandemError("UNSPECIFIED", "broken", code=UNAVAILABLE)] * 4
        for number in range(10):
            await collect(c.stub, request([number, *PROMPT], 1))
        assert len(bad.calls) == 3, "after three failures in a row nothing more goes there"
        assert c.engine(0).state == rpb.FLEET_STATE_SUSPECT
        await until(lambda: not c.engine(0).excluded(time.monotonic()))
        for number in range(4):
            await collect(c.stub, request([number, *PROMPT], 1))
        assert len(bad.calls) == 4, "one probe, which failed too; the next rest is longer"
        await until(lambda: not c.engine(0).excluded(time.monotonic()))
        for number in range(8):
            await collect(c.stub, request([number, *PROMPT], 1))
        assert len(bad.calls) > 5
        assert c.engine(0).state == rpb.FLEET_STATE_READY


async def test_health_and_stuck_states() -> None:
    from tandem.engine.v1 import engine_pb2 as epb

    async with cluster(2) as c:
        assert c.engines[0].health is not None
        await c.engines[0].health.set(False)
        await until(lambda: c.engine(0).state == rpb.FLEET_STATE_SUSPECT)
        assert c.engine(0).excluded(time.monotonic() + 100) == "suspect"
        await c.engines[0].health.set(True)
        await until(lambda: c.engine(0).state == rpb.FLEET_STATE_READY)
        for state, seen in (
            (epb.ENGINE_STATE_STARTING, rpb.FLEET_STATE_STARTING),
            (epb.ENGINE_STATE_DRAINING, rpb.FLEET_STATE_DRAINING),
            (epb.ENGINE_STATE_STUCK, rpb.FLEET_STATE_DOWN),
            (epb.ENGINE_STATE_READY, rpb.FLEET_STATE_READY),
        ):
            c.engines[0].state = state
            await until(lambda seen=seen: c.engine(0).state == seen)


async def test_several_models_side_by_side() -> None:
    async with cluster(3) as c:
        c.engines[0].config.model, c.engines[0].config.aliases = "other", ()
        await until(lambda: len(c.router.fleet.models()) == 2)
        for _ in range(6):
            await collect(c.stub, request(PROMPT, 1))
        assert not c.engines[0].calls
        message = request(PROMPT, 1)
        message.model = "other"
        await collect(c.stub, message)
        assert len(c.engines[0].calls) == 1
        message.model = ""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(c.stub, message)
        assert "mock, other" in (caught.value.details() or "")


async def test_index_follows_the_engines_events() -> None:
    async with cluster(2) as c:
        await collect(c.stub, request(PROMPT, 1))
        used = next(i for i, engine in enumerate(c.engines) if engine.calls)
        await until(lambda: c.engine(used).feed.indexed() == 6)
        result = await collect(c.stub, request(PROMPT, 1))
        assert result.accepted[0].cached_tokens == 96
        # A lost event is noticed at the next one, and a snapshot mends it.
        c.engines[used].drop_events = 1
        c.engines[used]._store([bytes(16)])
        c.engines[used]._store([bytes(15) + b"1"])
        await until(lambda: c.engine(used).feed.indexed() == 8)
        assert len(c.engines[used].subscriptions) == 2


async def test_without_events_predictions_do() -> None:
    async with cluster(3, MockConfig(kv_events=False)) as c:
        for _ in range(6):
            await collect(c.stub, request(PROMPT, 1))
        assert sorted(len(engine.calls) for engine in c.engines) == [0, 0, 6]
        view = (await c.admin.ListEngines(rpb.ListEnginesRequest())).engines[0]
        assert not view.events_live


async def test_admin_view_and_explanation() -> None:
    async with cluster(2) as c:
        await collect(c.stub, request(PROMPT, 3, request_id="r1"))
        await until(lambda: sum(c.engine(i).feed.indexed() for i in range(2)) == 6)
        listed = await c.admin.ListEngines(rpb.ListEnginesRequest())
        assert [view.address for view in listed.engines] == sorted(engine.address for engine in c.engines)
        assert sum(view.indexed_blocks for view in listed.engines) == 6
        assert all(view.state == rpb.FLEET_STATE_READY and view.events_live for view in listed.engines)
        decision = (await c.admin.ExplainRoute(rpb.ExplainRouteRequest(request=request(PROMPT, 3)))).decision
        used = next(engine for engine in c.engines if engine.calls)
        assert decision.chosen == used.address
        matched = {candidate.address: candidate.matched_blocks for candidate in decision.candidates}
        assert sorted(matched.values()) == [0, 6]
        assert set(decision.candidates[0].parts) >= {"queue", "prefill", "kv"}
        assert len(used.calls) == 1, "explaining sends nothing"
        await c.engines[1].kill()
        await until(lambda: not c.engine(1).connected)
        decision = (await c.admin.ExplainRoute(rpb.ExplainRouteRequest(request=request(PROMPT, 3)))).decision
        assert {x.address: x.excluded for x in decision.candidates}[c.engines[1].address] == "down"


async def test_flight_recorder(tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    async with cluster(2, recorder_file=str(path)) as c:
        for number in range(3):
            await collect(c.stub, request([number, *PROMPT * 11], 4, request_id=f"r{number}"))
        seen: list[rpb.RouteDecision] = []
        watch = c.admin.WatchRoutes(rpb.WatchRoutesRequest(last=2, follow=True))

        async def follow() -> None:
            async for response in watch:
                seen.extend(response.decisions)

        task = asyncio.create_task(follow())
        await until(lambda: len(seen) == 2)
        await collect(c.stub, request(PROMPT, 4, request_id="late"))
        await until(lambda: len(seen) == 3)
        watch.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [decision.request_id for decision in seen] == ["r1", "r2", "late"]
        assert seen[0].outcome == "ok" and seen[0].ttft_ms > 0
        assert seen[0].HasField("actual_cached_tokens")
        assert len(seen[0].candidates) == 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["request_id"] for row in rows] == ["r0", "r1", "r2", "late"]
    assert rows[0]["input_length"] == 1101 and rows[0]["output_length"] == 4
    assert len(rows[0]["hash_ids"]) == 2
    assert rows[0]["hash_ids"] != rows[1]["hash_ids"]
    # The simulator replays it.
    replayed = World(traces.read(path), MODELS["cpu-135m"], SimConfig("prefix_exact", engines=2)).run()
    assert (replayed.requests, replayed.served) == (4, 1.0)
    from benchmarks.simulation.traces import read

    assert len(read(path).requests) == 4, "a recording can be replayed"


async def test_routing_config_can_be_changed() -> None:
    async with cluster(2) as c:
        update = rpb.UpdateRoutingConfigRequest(config=rpb.RoutingConfig(policy="round_robin", max_retries=0))
        config = (await c.admin.UpdateRoutingConfig(update)).config
        assert (config.policy, config.max_retries, config.max_queued) == ("round_robin", 0, 1024)
        for _ in range(4):
            await collect(c.stub, request(PROMPT, 1))
        assert [len(engine.calls) for engine in c.engines] == [2, 2]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await c.admin.UpdateRoutingConfig(rpb.UpdateRoutingConfigRequest(config=rpb.RoutingConfig(policy="best")))
        assert TandemError.from_rpc(caught.value).field == "policy"
        assert (await c.admin.GetRoutingConfig(rpb.GetRoutingConfigRequest())).config.policy == "round_robin"


async def test_metrics_tell_the_error_of_the_prediction() -> None:
    async with cluster(1) as c:
        await collect(c.stub, request(PROMPT, 1))
        await until(lambda: c.engine().feed.indexed() == 6)
        await collect(c.stub, request(PROMPT, 1))
        text = c.router.metrics.text().decode()
        assert 'tandem_router_requests_total{outcome="ok"} 2.0' in text
        assert "tandem_router_predicted_cached_tokens_total 96.0" in text
        assert "tandem_router_cached_tokens_total 96.0" in text
        assert 'tandem_router_engines{state="ready"} 1.0' in text


async def test_token_is_asked_for_and_shown() -> None:
    from router.server import RouterServer
    from tandem import rpc

    engine = await MockEngine("127.0.0.1:0").start()
    settings = RouterSettings(listen="127.0.0.1:0", admin_listen="", engines=engine.address)
    router = RouterServer(settings, token="secret")
    await router.start()
    try:
        async with rpc.channel(router.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await until(lambda: len(router.fleet.usable("mock")) == 1)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await collect(stub, request(PROMPT, 1))
            assert TandemError.from_rpc(caught.value).reason == "UNAUTHENTICATED"
            result = await collect(stub, request(PROMPT, 1), metadata=(("authorization", "Bearer secret"),))
            assert len(result.ids[0]) == 1
    finally:
        await router.stop(0)
        await engine.stop()


async def test_untrusted_callers_raise_no_priority_and_name_no_tenant() -> None:
    async with cluster(1) as c:
        servicer = c.router.inference
        message = request(PROMPT, 1, priority=-5, tenant="boss")
        query = object()

        class Context:
            def time_remaining(self) -> None:
                return None

        job = servicer._job(message, query, "mock", 0.0, Context())  # type: ignore[arg-type]
        assert (job.priority, job.tenant) == (-5, "boss")
        servicer._trusted = False
        job = servicer._job(message, query, "mock", 0.0, Context())  # type: ignore[arg-type]
        assert (job.priority, job.tenant) == (0, "")


async def test_router_drains_on_stop() -> None:
    async with cluster(1, MockConfig(step_s=0.01)) as c:
        running = asyncio.create_task(collect(c.stub, request(PROMPT, 30)))
        await until(lambda: c.engines[0].running == 1)
        stopping = asyncio.create_task(c.router.stop(5.0))
        await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(c.stub, request(PROMPT, 1))
        assert caught.value.code() == UNAVAILABLE
        assert len((await running).ids[0]) == 30
        await stopping


async def test_a_stopping_router_sends_its_clients_elsewhere_at_once() -> None:
    """Their connection is given up for new calls while the old ones go on: else a gateway would stay with it."""
    async with cluster(1, MockConfig(step_s=0.01)) as c:
        running = asyncio.create_task(collect(c.stub, request(PROMPT, 200)))
        await until(lambda: c.engines[0].running == 1)
        stopping = asyncio.create_task(c.router.stop(20.0))
        await until(lambda: c.channel.get_state() is not grpc.ChannelConnectivity.READY)
        assert not running.done()
        assert len((await running).ids[0]) == 200
        await stopping


async def test_router_ends_streams_with_an_error_after_the_grace() -> None:
    async with cluster(1, MockConfig(step_s=0.01)) as c:
        running = asyncio.create_task(collect(c.stub, request(PROMPT, 3000)))
        await until(lambda: c.engines[0].running == 1)
        await c.router.stop(0.1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running
        assert TandemError.from_rpc(caught.value).reason == "ENGINE_DRAINING"
        await until(lambda: c.engines[0].running == 0)


def test_router_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, router.main, router.server, router.settings;"
        "print([name for name in ('torch', 'transformers', 'gateway', 'engine_service') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_process_serves_until_sigterm(short_dir: Path) -> None:
    code = (
        "from router.main import run; from router.settings import RouterSettings;"
        f"raise SystemExit(run(RouterSettings(listen='unix:{short_dir}/r', admin_listen='unix:{short_dir}/a')))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 20
        while not (short_dir / "a").exists() or not (short_dir / "r").exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        with grpc.insecure_channel(f"unix:{short_dir}/r") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert not stub.ListModels(pb.ListModelsRequest(), wait_for_ready=True, timeout=10).models
        time.sleep(0.2)
        assert (short_dir / "r").stat().st_mode & 0o777 == 0o600
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_workers_share_the_port(free_port: int) -> None:
    code = (
        "from router.main import run; from router.settings import RouterSettings\n"
        "if __name__ == '__main__':\n"
        f"    raise SystemExit(run(RouterSettings(listen='127.0.0.1:{free_port}', admin_listen='', workers=2)))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{free_port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert not stub.ListModels(pb.ListModelsRequest(), wait_for_ready=True, timeout=30).models
        import psutil

        end = time.monotonic() + 20
        while sum(_listens(child, free_port) for child in psutil.Process(process.pid).children(recursive=True)) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
        process.terminate()
        assert process.wait(15) == 0
    finally:
        process.kill()
        process.wait()


def _listens(process: object, port: int) -> bool:
    import psutil

    assert isinstance(process, psutil.Process)
    return any(entry.laddr.port == port for entry in process.net_connections("tcp") if entry.status == "LISTEN")


def test_bad_settings_end_the_process_with_a_sentence(short_dir: Path) -> None:
    from router.main import run

    assert run(RouterSettings(listen=f"unix:{short_dir}/r", workers=2)) == 2
    assert run(RouterSettings(service_token_file="/nonexistent")) == 2
    with pytest.raises(ValueError, match="known policies"):
        RouterSettings(policy="best")


async def test_reflection_names_the_services() -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with router_for("") as router:
        for address, name in (
            (router.address, "tandem.inference.v1.InferenceService"),
            (router.admin_address, "tandem.router.v1.RouterAdminService"),
        ):
            async with grpc.aio.insecure_channel(address) as channel:
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                call = stub.ServerReflectionInfo()
                await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                await call.done_writing()
                answer = await call.read()
                assert name in [service.name for service in answer.list_services_response.service]


@pytest.mark.parametrize("wide", [True, False])
async def test_an_admin_listener_beyond_loopback_asks_for_the_token(
    wide: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RouterSettings(listen="127.0.0.1:0", admin_listen="0.0.0.0:0" if wide else "127.0.0.1:0", engines="")
    router = RouterServer(settings, token="secret")
    await router.start()
    try:
        port = router.admin_address.rpartition(":")[2]
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            stub = router_pb2_grpc.RouterAdminServiceStub(channel)
            shown = (("authorization", "Bearer secret"),)
            await stub.ListEngines(rpb.ListEnginesRequest(), metadata=shown)
            async for _ in stub.WatchRoutes(rpb.WatchRoutesRequest(last=3), metadata=shown):
                pass
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            for metadata in (None, (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
                if not wide:
                    await stub.ListEngines(rpb.ListEnginesRequest(), metadata=metadata)
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.UpdateRoutingConfig(rpb.UpdateRoutingConfigRequest(), metadata=metadata)
                assert TandemError.from_rpc(caught.value).reason == "UNAUTHENTICATED"
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stub.WatchRoutes(rpb.WatchRoutesRequest(last=3), metadata=metadata):
                        pass
                assert TandemError.from_rpc(caught.value).reason == "UNAUTHENTICATED"
        # tandem status, top and routes find it where the services do.
        (tmp_path / "token").write_text("secret\n")
        for name in ("", str(tmp_path / "token")):
            monkeypatch.setenv("TANDEM_SERVICE_TOKEN_FILE", name)
            source = AdminSource(f"127.0.0.1:{port}")
            if name or not wide:
                assert (await source.fleet())["engines"] == await source.routes(3) == []
            else:
                with pytest.raises(UnreachableError, match="UNAUTHENTICATED"):
                    await source.fleet()
            await source.close()
    finally:
        await router.stop(0)
