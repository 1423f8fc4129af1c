"""/mcp, asked with the protocol's own client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from gateway.keys import hash_key
from tests.gateway import admin_mock
from tests.gateway.conftest import LoopThread, Stand
from tests.gateway.mock_router import MODEL

TURNS = [{"role": "user", "content": "one two three"}]


def talk(url: str, work: Callable[[Client], Awaitable[Any]], key: str = "", mode: str = "auto") -> Any:
    """Runs `work` with a connected client."""

    async def run() -> Any:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        http = httpx2.AsyncClient(headers=headers, timeout=60, trust_env=False)
        async with http, Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client:
            return await work(client)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def admin(router_loop: LoopThread) -> Iterator[tuple[admin_mock.MockAdmin, str]]:
    server, servicer, port = router_loop.run(admin_mock.start())
    servicer.engines = [admin_mock.engine("engine-0", running=1)]
    yield servicer, f"127.0.0.1:{port}"
    router_loop.run(server.stop(0))


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_tools_and_a_chat(stand: Stand, mode: str) -> None:
    notes: list[tuple[float, float | None, str | None]] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        notes.append((done, total, message))

    async def work(client: Client) -> Any:
        listed = await client.list_tools()
        arguments = {"messages": TURNS, "max_tokens": 6, "temperature": 0}
        return listed.tools, await client.call_tool("chat", arguments, progress_callback=progress)

    tools, answer = talk(stand.url, work, mode=mode)
    assert {tool.name for tool in tools} == {"chat", "complete", "list_models", "status"}
    assert all(tool.description and tool.output_schema for tool in tools)
    assert not answer.is_error
    result = answer.structured_content
    assert result["model"] == MODEL and result["completion_tokens"] == 6 and result["finish_reason"] == "length"
    assert "".join(message or "" for _, _, message in notes) == result["text"]
    assert notes[-1][:2] == (6, 6)
    # It went the way of all requests.
    entry = stand.http.get("/tandem/requests").json()["data"][-1]
    assert entry["path"] == "/mcp" and entry["completion_tokens"] == 6 and entry["receipts"]


def test_chat_says_the_same_as_the_api(stand: Stand) -> None:
    async def work(client: Client) -> Any:
        return await client.call_tool("chat", {"messages": TURNS, "max_tokens": 8, "seed": 5})

    body = {"messages": TURNS, "max_tokens": 8, "seed": 5}
    expected = stand.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert talk(stand.url, work).structured_content["text"] == expected


def test_complete_models_and_errors(stand: Stand) -> None:
    async def work(client: Client) -> Any:
        return [
            await client.call_tool("complete", {"prompt": "one two", "max_tokens": 3, "temperature": 0}),
            await client.call_tool("list_models", {}),
            await client.call_tool("complete", {"prompt": "one", "model": "nothing"}),
            await client.call_tool("chat", {"messages": TURNS, "max_tokens": 1_000_000}),
            await client.call_tool("chat", {"messages": TURNS, "temperature": 3}),
        ]

    complete, models, unknown, too_long, too_hot = talk(stand.url, work)
    assert complete.structured_content["completion_tokens"] == 3
    assert models.structured_content["models"][0]["name"] == MODEL
    assert unknown.is_error and "nothing" in unknown.content[0].text and MODEL in unknown.content[0].text
    assert too_long.is_error and "1000000" in too_long.content[0].text
    assert too_hot.is_error and "temperature" in too_hot.content[0].text


def test_status(make_stand: Any, admin: tuple[admin_mock.MockAdmin, str]) -> None:
    async def work(client: Client) -> Any:
        return await client.call_tool("status", {})

    stand = make_stand(router_admin=admin[1])
    found = talk(stand.url, work).structured_content
    assert found["ready"] and found["queued"] == 3
    assert found["engines"][0]["name"] == "engine-0" and found["engines"][0]["running"] == 1
    assert found["models"] == [MODEL] and found["note"] == ""
    without = talk(make_stand(router_admin="").url, work).structured_content
    assert without["ready"] and without["queued"] is None and "--router-admin" in without["note"]


def test_keys_and_origins(make_stand: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"id": "ann", "sha256": hash_key("secret")}]}))
    stand = make_stand(keys_file=str(file))
    assert stand.http.post("/mcp", json={}).status_code == 401

    async def work(client: Client) -> Any:
        return await client.call_tool("complete", {"prompt": "one", "max_tokens": 2})

    assert not talk(stand.url, work, key="secret").is_error
    assert stand.router.requests[-1].tenant == "ann"
    mine = {"authorization": "Bearer secret", "origin": "https://evil.example"}
    refused = stand.http.post("/mcp", json={}, headers=mine)
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin_not_allowed"


def test_a_client_that_leaves_cancels(stand: Stand) -> None:
    stand.router.token_delay = 0.05

    async def work(client: Client) -> Any:
        call = asyncio.create_task(client.call_tool("complete", {"prompt": "one two", "max_tokens": 1000}))
        await asyncio.sleep(1.0)
        assert stand.router.requests and not call.done()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    talk(stand.url, work)
    until = time.monotonic() + 10
    while not stand.router.cancelled:
        assert time.monotonic() < until, "still running"
        time.sleep(0.05)


def test_stopping_ends_what_runs(make_stand: Any) -> None:
    stand = make_stand()
    stand.router.token_delay = 0.05

    async def work(client: Client) -> Any:
        call = asyncio.create_task(client.call_tool("complete", {"prompt": "one two", "max_tokens": 1000}))
        await asyncio.sleep(1.0)
        assert not call.done()
        stand.app.state.gateway.end_requests()
        await asyncio.wait({call}, timeout=20)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    talk(stand.url, work)
    until = time.monotonic() + 10
    while not stand.router.cancelled:
        assert time.monotonic() < until, "still running"
        time.sleep(0.05)
    stand.router.token_delay = 0.0


def test_a_listening_client_does_not_hold_up_a_stop(make_stand: Any) -> None:
    stand = make_stand()
    headers = {"accept": "text/event-stream"}
    with stand.http.stream("GET", "/mcp", headers=headers) as answer:
        stand.app.state.gateway.stopping = True
        started = time.monotonic()
        answer.read()
    assert time.monotonic() - started < 10


def test_off_and_unloaded(make_stand: Any) -> None:
    assert make_stand(mcp=False).http.post("/mcp", json={}).status_code == 404
    script = (
        "import sys\nfrom gateway.app import build_app\nfrom gateway.settings import GatewaySettings\n"
        "build_app(GatewaySettings())\nassert 'mcp.server' not in sys.modules and 'mcp' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=100).returncode == 0
