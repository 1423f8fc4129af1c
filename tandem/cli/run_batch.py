"""`tandem run-batch in.jsonl out.jsonl`: OpenAI's batch file format against a running server."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.services import fail

if TYPE_CHECKING:
    import httpx

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


@dataclass(frozen=True)
class Line:
    """One request of the input file; `error` says what is wrong with the line itself."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    error: str = ""


def parse_line(number: int, text: str) -> Line:
    """Reads one input line. A bad line becomes a Line with `error`, so that it is answered like the others."""
    try:
        item = json.loads(text)
    except ValueError as error:
        return Line(number, f"line-{number}", "", {}, f"line {number} is no JSON: {error}")
    if not isinstance(item, dict):
        return Line(number, f"line-{number}", "", {}, f"line {number} is no JSON object")
    custom_id, url, body = item.get("custom_id"), item.get("url"), item.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return Line(number, f"line-{number}", "", {}, f"line {number} has no custom_id")
    if item.get("method", "POST") != "POST":
        return Line(number, custom_id, "", {}, f"method is {item['method']!r}, but only POST is allowed")
    if url not in ENDPOINTS:
        return Line(number, custom_id, "", {}, f"url is {url!r}, but must be one of {', '.join(ENDPOINTS)}")
    if not isinstance(body, dict):
        return Line(number, custom_id, "", {}, "body is no JSON object")
    if body.get("stream"):
        return Line(number, custom_id, "", {}, "body.stream is true, but a batch has no streams")
    return Line(number, custom_id, url, body)


def read_lines(path: Path) -> list[Line]:
    """All requests of the file. A custom_id that was there before is an error of the later line."""
    seen: set[str] = set()
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        if not text.strip():
            continue
        line = parse_line(number, text)
        if line.custom_id in seen:
            line = Line(number, line.custom_id, "", {}, f"custom_id {line.custom_id!r} is used twice (line {number})")
        seen.add(line.custom_id)
        lines.append(line)
    return lines


def finished_ids(path: Path) -> set[str]:
    """custom_ids that the file has a lasting answer for; others, and a line that was cut off, are dropped from it."""
    done: set[str] = set()
    if not path.exists():
        return done
    kept = []
    for text in path.read_text().splitlines():
        try:
            item = json.loads(text)
        except ValueError:
            continue
        response = item.get("response")
        # What failed on the server's side or on the way is tried again.
        if response is not None and response.get("status_code", 0) < 500:
            kept.append(text)
            done.add(item["custom_id"])
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(text + "\n" for text in kept))
    os.replace(partial, path)
    return done


def _result(line: Line, response: dict[str, Any] | None, error: dict[str, str] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": error}


async def answer(client: httpx.AsyncClient, line: Line, retries: int = 5) -> dict[str, Any]:
    """The output line for one request. Overload is waited for; a bad line is answered with status 400."""
    import httpx

    if line.error:
        body = {"error": {"message": line.error, "type": "invalid_request_error", "param": None, "code": None}}
        return _result(line, {"status_code": 400, "request_id": "", "body": body}, None)
    for attempt in range(retries + 1):
        try:
            got = await client.post(line.url, json=line.body)
        except httpx.HTTPError as error:
            if attempt == retries:
                return _result(line, None, {"code": "connection_error", "message": str(error) or repr(error)})
            await asyncio.sleep(min(30.0, 0.5 * 2**attempt))
            continue
        if got.status_code in (429, 503) and attempt < retries:
            await asyncio.sleep(min(60.0, float(got.headers.get("retry-after") or 1)))
            continue
        try:
            content = got.json()
        except ValueError:
            content = {"error": {"message": got.text[:1000]}}
        request_id = got.headers.get("x-request-id", "")
        return _result(line, {"status_code": got.status_code, "request_id": request_id, "body": content}, None)
    raise AssertionError("the last attempt returns")


async def run(lines: list[Line], url: str, out: IO[str], concurrency: int, advance: Any) -> int:
    """Answers all lines, each written as soon as it is there. Returns how many failed."""
    import httpx

    key = os.environ.get("TANDEM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    waiting = iter(lines)
    failed = 0

    async def worker(client: httpx.AsyncClient) -> None:
        nonlocal failed
        for line in waiting:
            result = await answer(client, line)
            response = result["response"]
            failed += response is None or response["status_code"] >= 400
            out.write(json.dumps(result, ensure_ascii=False) + "\n")
            out.flush()
            advance()

    limits = httpx.Limits(max_connections=concurrency)
    session = httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits)
    async with session as client, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker(client))
    return failed


def register(app: typer.Typer) -> None:
    @app.command("run-batch")
    def run_batch(
        source: Annotated[Path, typer.Argument(help="input, one request a line")],
        target: Annotated[Path, typer.Argument(help="output; answers that are there already are kept")],
        url: Annotated[str, typer.Option(envvar="TANDEM_URL", help="server")] = "http://127.0.0.1:8000",
        concurrency: Annotated[int, typer.Option(min=1, max=1024, help="requests at once")] = 16,
    ) -> None:
        """Answers a file of requests (OpenAI's batch format). Goes on where an earlier run stopped."""
        from rich.progress import Progress

        if source.resolve() == target.resolve():
            raise fail("input and output are the same file")
        try:
            lines = read_lines(source)
            done = finished_ids(target)
        except OSError as error:
            raise fail(f"{error.filename}: {error.strerror}") from None
        left = [line for line in lines if line.custom_id not in done]
        with Progress() as progress, target.open("a") as out:
            task = progress.add_task("requests", total=len(lines), completed=len(lines) - len(left))
            failed = asyncio.run(run(left, url, out, concurrency, lambda: progress.advance(task)))
        print(f"{len(left)} answered, {failed} of them with an error, {len(lines) - len(left)} were there already")
        raise typer.Exit(1 if failed else 0)
