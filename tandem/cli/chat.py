"""`tandem chat`: talk to a running server in the terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cli.services import fail

if TYPE_CHECKING:
    import httpx

HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends."


def _client(url: str) -> httpx.Client:
    import httpx

    headers = {}
    key = os.environ.get("TANDEM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    if key:
        headers["authorization"] = f"Bearer {key}"
    return httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(600, connect=5))


def served_models(client: httpx.Client) -> list[str]:
    """Names from /v1/models."""
    answer = client.get("/v1/models")
    answer.raise_for_status()
    return [str(item["id"]) for item in answer.json()["data"]]


def stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """Text deltas of one streamed chat answer. Raises RuntimeError with the server's message."""
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            answer.read()
            raise RuntimeError(_message(answer.text))
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(_message(line[6:]))
            for choice in event.get("choices", ()):
                yield choice["delta"].get("content") or ""


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300] or "the server gave no reason"


def register(app: typer.Typer) -> None:
    @app.command("chat")
    def chat(
        prompt: Annotated[str | None, typer.Argument(help="Ask this and exit; without it, a conversation.")] = None,
        url: Annotated[str, typer.Option(envvar="TANDEM_URL", help="server")] = "http://127.0.0.1:8000",
        model: Annotated[str | None, typer.Option(help="served name; default: the first")] = None,
        system: Annotated[str | None, typer.Option(help="system prompt")] = None,
        temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
        max_tokens: Annotated[int, typer.Option(help="longest answer, tokens")] = 512,
    ) -> None:
        """Talks to a running server in the terminal. A key is read from TANDEM_API_KEY or OPENAI_API_KEY."""
        import httpx

        client = _client(url)
        try:
            names = served_models(client)
        except httpx.HTTPError as error:
            raise fail(f"{url} does not answer as a server ({error}); is `tandem serve` running?", 1) from None
        if not names and model is None:
            raise fail(f"{url} serves no model now; its engines are not ready", 1)
        body: dict[str, Any] = {"model": model or names[0], "max_tokens": max_tokens}
        if temperature is not None:
            body["temperature"] = temperature
        first = [{"role": "system", "content": system}] if system else []
        if prompt is not None:
            _ask(client, body, [*first, {"role": "user", "content": prompt}])
            return
        print(f"{body['model']} at {url}. {HELP}")
        _converse(client, body, first)


def _ask(client: httpx.Client, body: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """Prints the answer as it comes and returns it."""
    import httpx

    text = ""
    try:
        for piece in stream(client, {**body, "messages": messages}):
            text += piece
            print(piece, end="", flush=True)
    except (RuntimeError, httpx.HTTPError) as error:
        print()
        raise fail(str(error), 1) from None
    print()
    return text


def _converse(client: httpx.Client, body: dict[str, Any], first: list[dict[str, str]]) -> None:
    messages = list(first)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            messages = list(first)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": _ask(client, body, messages)})
        except typer.Exit:
            # The server refused this turn (it said why): the conversation goes on without it.
            messages.pop()
        except KeyboardInterrupt:
            print(" (stopped)")
            messages.pop()
