from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.main import build_app
from tandem.cli.run_batch import finished_ids, parse_line, read_lines


class Server(http.server.BaseHTTPRequestHandler):
    """Echoes the user's text; "busy" is 503 once, "bad" is 400, "broken" is 500 always."""

    seen: list[str]
    busy: bool

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][0]["content"]
        type(self).seen.append(text)
        status = {"bad": 400, "broken": 500}.get(text, 200)
        if text == "busy" and type(self).busy:
            type(self).busy, status = False, 503
        self.send_response(status)
        self.send_header("retry-after", "0")
        self.send_header("x-request-id", "r-" + text)
        self.end_headers()
        self.wfile.write(json.dumps({"echo": text}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(free_port: int) -> Iterator[str]:
    Server.seen, Server.busy = [], True
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", free_port), Server)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{free_port}"
    httpd.shutdown()


def request(custom_id: str, text: str, **more: Any) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | more)


def run(source: Path, target: Path, url: str) -> Any:
    return CliRunner().invoke(build_app("run-batch"), ["run-batch", str(source), str(target), "--url", url])


def results(target: Path) -> dict[str, dict[str, Any]]:
    return {item["custom_id"]: item for item in map(json.loads, target.read_text().splitlines())}


def test_each_line_is_answered_and_overload_is_waited_for(server: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([request("a", "one"), request("b", "busy"), request("c", "bad"), "{", ""]))
    done = run(source, target, server)
    assert done.exit_code == 1
    found = results(target)
    assert found["a"]["response"] == {"status_code": 200, "request_id": "r-one", "body": {"echo": "one"}}
    assert found["b"]["response"]["status_code"] == 200
    assert Server.seen.count("busy") == 2
    assert found["c"]["response"]["status_code"] == 400
    assert "line 4 is no JSON" in found["line-4"]["response"]["body"]["error"]["message"]
    assert len(found) == 4


def test_a_second_run_asks_only_for_what_is_missing(server: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([request("a", "one"), request("b", "broken"), request("c", "three")]))
    assert run(source, target, server).exit_code == 1
    # As if the process had been killed while it wrote the last line.
    target.write_text("\n".join(line for line in target.read_text().splitlines() if '"c"' not in line) + '\n{"id": "x')
    Server.seen.clear()
    run(source, target, server)
    assert sorted(Server.seen) == ["broken", "three"]
    assert set(results(target)) == {"a", "b", "c"}


def test_a_server_that_is_not_there_is_an_error_of_each_line(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_wait(_: float) -> None:
        return None

    monkeypatch.setattr("tandem.cli.run_batch.asyncio.sleep", no_wait)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(request("a", "one"))
    assert run(source, target, f"http://127.0.0.1:{free_port}").exit_code == 1
    assert results(target)["a"]["error"]["code"] == "connection_error"
    assert finished_ids(target) == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "no JSON object"),
        ("{}", "no custom_id"),
        (request("a", "x", url="/v1/files"), "url is '/v1/files'"),
        (request("a", "x", method="GET"), "only POST"),
        (request("a", "x", body=[]), "body is no JSON object"),
        (request("a", "x", body={"stream": True}), "no streams"),
    ],
)
def test_bad_lines_say_what_is_wrong(text: str, words: str) -> None:
    assert words in parse_line(1, text).error


def test_a_custom_id_may_be_used_once(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(request("a", "x") + "\n" + request("a", "y"))
    first, second = read_lines(source)
    assert first.error == ""
    assert "used twice" in second.error


def test_input_and_output_must_differ(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(request("a", "x"))
    assert run(source, source, "http://127.0.0.1:9").exit_code == 2
    assert source.read_text() == request("a", "x")
