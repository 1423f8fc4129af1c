"""The live page's files and the data behind it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.keys import hash_key
from gateway.latency import latency
from gateway.metrics import Metrics
from gateway.recent import Recent
from tandem.router.v1 import router_pb2 as rpb
from tests.gateway import admin_mock
from tests.gateway.conftest import LoopThread, Stand

WEB = Path(__file__).resolve().parents[2] / "gateway" / "web"
BODY = {"prompt": "one two three", "max_tokens": 3, "temperature": 0}


@dataclass
class Admin:
    """The mock, its address, and the loop that it runs on."""

    mock: admin_mock.MockAdmin
    address: str
    loop: LoopThread


@pytest.fixture
def admin(router_loop: LoopThread) -> Iterator[Admin]:
    server, mock, port = router_loop.run(admin_mock.start())
    yield Admin(mock, f"127.0.0.1:{port}", router_loop)
    router_loop.run(server.stop(0))


def events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def test_files_are_served_with_strict_headers(stand: Stand) -> None:
    page = stand.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    for path in sorted(WEB.iterdir()):
        answer = stand.http.get(f"/web/{path.name}")
        assert answer.content == path.read_bytes() and answer.headers["x-content-type-options"] == "nosniff"
    again = stand.http.get("/", headers={"if-none-match": page.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert stand.http.get("/web/../settings.py").status_code == 404
    assert stand.http.get("/web/nothing.js").status_code == 404


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in WEB.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import", text), path.name
        for name in re.findall(r"""from ["']\./([\w.]+)["']""", text):
            assert (WEB / name).is_file(), f"{path.name} imports {name}"
    index = (WEB / "index.html").read_text()
    for name in re.findall(r'(?:src|href)="/web/([\w.]+)"', index):
        assert (WEB / name).is_file()
    # The page's policy forbids inline styles and scripts.
    assert " style=" not in index and "<style" not in index and not re.search(r"<script(?![^>]*src)", index)


def test_scripts_find_the_elements_that_they_ask_for() -> None:
    ids = set(re.findall(r'id="([\w-]+)"', (WEB / "index.html").read_text()))
    for path in WEB.glob("*.js"):
        asked = set(re.findall(r'byId\("([\w-]+)"\)|new Chart\("([\w-]+)"', path.read_text()))
        assert {name for pair in asked for name in pair if name} <= ids, path.name


def test_page_can_be_turned_off(make_stand: Any) -> None:
    stand = make_stand(page=False)
    assert stand.http.get("/").status_code == 404
    assert stand.http.get("/web/page.js").status_code == 404


def test_fleet(make_stand: Any, admin: Admin) -> None:
    admin.mock.engines = [
        admin_mock.engine("engine-0", running=2, kv_blocks_used=25, cached_tokens=30, prefill_tokens=10),
        rpb.EngineView(address="host:5", state=rpb.FLEET_STATE_SUSPECT, consecutive_failures=3, last_error="refused"),
    ]
    stand = make_stand(router_admin=admin.address)
    fleet = stand.http.get("/tandem/fleet").json()
    assert (fleet["queued"], fleet["shed"]) == (3, 5)
    first, second = fleet["engines"]
    assert (first["name"], first["state"], first["epoch"]) == ("engine-0", "ready", "0000000000001234")
    assert (first["kv_use"], first["hit_rate"], first["acceptance"]) == (0.25, 0.75, None)
    assert (first["model"], first["numerics_id"], first["breaker"]) == ("toy", "n1", "closed")
    assert (second["name"], second["state"], second["breaker"]) == ("host:5", "suspect", "open")
    assert second["running"] is None and second["last_error"] == "refused"
    assert fleet["latency"]["ttft"]["counts"] == [] or len(fleet["latency"]["ttft"]["counts"]) > 1


def test_many_pages_ask_the_router_once(make_stand: Any, admin: Admin) -> None:
    stand = make_stand(router_admin=admin.address)
    stand.http.get("/tandem/fleet")
    before = admin.mock.calls
    for _ in range(3):
        stand.http.get("/tandem/fleet")
    assert admin.mock.calls - before <= 2


def test_routes(make_stand: Any, admin: Admin) -> None:
    admin.mock.decisions = [admin_mock.decision(f"r{number}") for number in range(5)]
    stand = make_stand(router_admin=admin.address)
    data = stand.http.get("/tandem/routes?last=2").json()["data"]
    assert [one["request_id"] for one in data] == ["r3", "r4"]
    assert data[0]["cached_tokens"] == 32 and data[0]["ttft_ms"] == 9.0 and data[0]["name"] == "engine-0"
    assert data[0]["candidates"][0]["parts"] == {"prefill": 4.5}
    assert data[0]["candidates"][1]["excluded"] == "draining"
    for path in ("/tandem/routes", "/tandem/requests"):
        for bad in ("-1", "x", "1001", "", "1.0", "٣"):
            error = stand.http.get(path, params={"last": bad})
            assert error.status_code == 400 and error.json()["error"]["param"] == "last"
        (told,) = stand.http.get("/openapi.json").json()["paths"][path]["get"]["parameters"]
        assert (told["name"], told["in"], told["required"]) == ("last", "query", False)
        # What the document allows is allowed, at its limits too.
        for allowed in (told["schema"]["minimum"], told["schema"]["maximum"]):
            assert stand.http.get(path, params={"last": allowed}).status_code == 200


def test_requests_have_receipts_that_nobody_asked_for(make_stand: Any) -> None:
    stand = make_stand()
    plain = stand.post("/v1/completions", BODY).json()
    assert "receipt" not in plain
    with stand.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        assert "receipt" not in answer.read().decode()
    stand.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    data = stand.http.get("/tandem/requests").json()["data"]
    assert [one["path"] for one in data] == ["/v1/completions", "/v1/completions", "/v1/chat/completions"]
    assert all(one["status"] == 200 and one["receipts"][0]["steps"] > 0 for one in data)
    assert data[0]["completion_tokens"] == 3 and data[0]["ttft_ms"] is not None
    assert len(stand.http.get("/tandem/requests?last=1").json()["data"]) == 1


def test_record_can_be_turned_off(make_stand: Any) -> None:
    stand = make_stand(recent_requests=0)
    stand.post("/v1/completions", BODY)
    assert not stand.router.requests[-1].output.receipt
    assert stand.http.get("/tandem/requests").json() == {"data": []}


def test_explain_sends_nothing(make_stand: Any, admin: Admin) -> None:
    stand = make_stand(router_admin=admin.address)
    body = {"messages": [{"role": "user", "content": "where?"}], "max_tokens": 4}
    refused = stand.post("/tandem/explain", body)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_engine"
    admin.mock.engines = [admin_mock.engine("engine-0")]
    answer = stand.post("/tandem/explain", body).json()
    assert answer["name"] == "engine-0" and answer["reason"].startswith("holds 32")
    assert admin.mock.explained[-1].token_ids.ids and not stand.router.requests
    assert stand.http.get("/tandem/requests").json() == {"data": []}


def test_event_stream(make_stand: Any, admin: Admin) -> None:
    admin.mock.engines = [admin_mock.engine("engine-0")]
    stand = make_stand(router_admin=admin.address)
    seen: dict[str, Any] = {}
    with stand.http.stream("GET", "/tandem/events") as answer:
        for name, value in events(answer):
            if name == "fleet" and name not in seen:
                assert stand.post("/v1/completions", BODY).status_code == 200
            if admin.mock.followers:
                admin.loop.run(admin.mock.decide(admin_mock.decision("r9")))
            seen[name] = value
            if {"fleet", "route", "request"} <= set(seen):
                break
    assert seen["route"]["request_id"] == "r9" and seen["request"]["completion_tokens"] == 3


def test_an_open_page_does_not_hold_up_a_stop(make_stand: Any, admin: Admin) -> None:
    stand = make_stand(router_admin=admin.address)
    with stand.http.stream("GET", "/tandem/events") as answer:
        found = events(answer)
        assert next(found)[0] == "fleet"
        stand.app.state.gateway.stopping = True
        # The stream ends, in order and long before the grace does.
        until = time.monotonic() + 10
        for _ in found:
            assert time.monotonic() < until
    assert time.monotonic() < until
    while admin.mock.followers:
        assert time.monotonic() < until, "the router is still asked"
        time.sleep(0.05)


def test_without_a_router_the_stream_tells_so(make_stand: Any) -> None:
    stand = make_stand(router_admin="127.0.0.1:9")
    answer = stand.http.get("/tandem/fleet")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "router_admin_unavailable"
    with stand.http.stream("GET", "/tandem/events") as stream:
        name, value = next(events(stream))
    assert name == "trouble" and "127.0.0.1" not in value["message"]
    assert make_stand(router_admin="").http.get("/tandem/routes").status_code == 503


def test_data_are_behind_the_keys_and_each_key_sees_its_own(make_stand: Any, admin: Admin, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"id": name, "sha256": hash_key(name)} for name in ("ann", "bob")]}))
    admin.mock.decisions = [admin_mock.decision("of-ann"), admin_mock.decision("of-bob")]
    stand = make_stand(router_admin=admin.address, keys_file=str(file))
    assert stand.http.get("/").status_code == 200 and stand.http.get("/web/page.js").status_code == 200
    for path in ("fleet", "routes", "requests", "events"):
        assert stand.http.get(f"/tandem/{path}").status_code == 401, path
    assert stand.http.post("/tandem/explain", json={}).status_code == 401
    for name in ("ann", "bob"):
        headers = {"authorization": f"Bearer {name}", "x-request-id": f"of-{name}"}
        assert stand.post("/v1/completions", BODY, headers=headers).status_code == 200
    mine = {"authorization": "Bearer ann"}
    data = stand.http.get("/tandem/requests", headers=mine).json()["data"]
    assert [one["id"] for one in data] == ["of-ann"]
    decisions = stand.http.get("/tandem/routes", headers=mine).json()["data"]
    assert [one["request_id"] for one in decisions] == ["of-ann", ""]


def test_token_sources(stand: Stand) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    error = stand.post("/v1/chat/completions", {**body, "return_token_sources": True})
    assert error.status_code == 400 and "stream" in error.json()["error"]["message"]
    with stand.http.stream(
        "POST", "/v1/chat/completions", json={**body, "stream": True, "return_token_sources": True}
    ) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert stand.router.requests[-1].output.single_tokens
    sources = [source for chunk in chunks for one in chunk["choices"] for source in one.get("token_sources", ())]
    assert sources == ["engine"] * 4


def test_latency_adds_up_models() -> None:
    metrics = Metrics()
    metrics.ttft.labels("a").observe(0.03)
    metrics.ttft.labels("b").observe(1e9)
    found = latency(metrics)["ttft"]
    assert len(found["counts"]) == len(found["bounds"]) + 1 and found["counts"][-1] == 2
    assert found["counts"][found["bounds"].index(0.04)] == 1 and found["counts"][found["bounds"].index(0.02)] == 0


def test_a_slow_follower_loses_the_oldest() -> None:
    from gateway.context import RequestContext
    from gateway.recent import MAX_WAITING

    recent = Recent(3)
    queue = recent.follow()
    for number in range(MAX_WAITING + 2):
        recent.finished(RequestContext(str(number)), "/p", 200, 0.1)
    assert queue.get_nowait()["id"] == "2" and queue.qsize() == MAX_WAITING - 1
    assert [entry["id"] for entry in recent.last(2, None)] == [str(MAX_WAITING), str(MAX_WAITING + 1)]
