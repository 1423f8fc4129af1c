"""A small client on the standard library alone, so that the nodes add nothing to ComfyUI's environment."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000/v1"
SETTINGS_FILE = Path(__file__).with_name("settings.json")


class TandemNodeError(RuntimeError):
    """What ComfyUI shows in the node that failed."""


@dataclass(frozen=True)
class Server:
    """Where to ask. The key never comes from a node: workflows are shared."""

    url: str
    key: str = ""


def find_server(base_url: str = "") -> Server:
    """The node's URL, else TANDEM_COMFYUI_URL, else "base_url" in settings.json, else this machine's port 8000.

    The key is TANDEM_COMFYUI_KEY, else "key" in settings.json.

    Raises:
        TandemNodeError: settings.json cannot be used, or the URL is none.
    """
    settings: dict[str, Any] = {}
    if SETTINGS_FILE.exists():
        try:
            settings = dict(json.loads(SETTINGS_FILE.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise TandemNodeError(f"{SETTINGS_FILE.name} cannot be read: {error}") from error
    url = base_url.strip() or os.environ.get("TANDEM_COMFYUI_URL") or str(settings.get("base_url") or DEFAULT_URL)
    key = os.environ.get("TANDEM_COMFYUI_KEY") or str(settings.get("key") or "")
    url = url.strip().rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise TandemNodeError(f"base_url is {url!r}, but must begin with http:// or https://")
    return Server(url if url.endswith("/v1") else f"{url}/v1", key)


def list_models(server: Server, timeout_s: float = 10.0) -> list[str]:
    """Names of the models that are served now. Raises TandemNodeError."""
    with _open(server, "/models", None, timeout_s) as answer:
        try:
            return [str(item["id"]) for item in json.load(answer)["data"]]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise TandemNodeError(f"{server.url}/models gave no list of models: {error}") from error


def stream_chat(server: Server, body: dict[str, Any], timeout_s: float = 300.0) -> Iterator[str]:
    """Pieces of the answer as they come. timeout_s: longest silence. Raises TandemNodeError."""
    with _open(server, "/chat/completions", {**body, "stream": True}, timeout_s) as answer:
        try:
            yield from _pieces(answer)
        except (OSError, HTTPException) as error:
            raise TandemNodeError(
                f"the connection to {server.url} broke in the middle of the answer: {error}"
            ) from error


def _pieces(answer: HTTPResponse) -> Iterator[str]:
    for raw in answer:
        line = raw.decode("utf-8").strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise TandemNodeError(f"the server sent no JSON: {data[:200]}") from error
        if "error" in event:
            raise TandemNodeError(_message(event) or "the server ended the answer with an error")
        for choice in event.get("choices", []):
            piece = choice.get("delta", {}).get("content")
            if piece:
                yield piece
    raise TandemNodeError("the answer ended before it was complete")


def _open(server: Server, path: str, body: dict[str, Any] | None, timeout_s: float) -> HTTPResponse:
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    if server.key:
        headers["Authorization"] = f"Bearer {server.key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers=headers)
    try:
        return urllib.request.urlopen(request, timeout=timeout_s)  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        raise TandemNodeError(_explain(server, error)) from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise TandemNodeError(f"{server.url} cannot be reached: {reason}. Is the server running?") from error


def _explain(server: Server, error: urllib.error.HTTPError) -> str:
    try:
        text = _message(json.loads(error.read(65_536)))
    except (ValueError, OSError):
        text = ""
    text = text or f"{server.url} answered {error.code} {error.reason}"
    if error.code in (401, 403):
        return f"{text} (set the key in TANDEM_COMFYUI_KEY or in {SETTINGS_FILE.name})"
    if error.code in (429, 503) and error.headers.get("Retry-After"):
        return f"{text} (try again in {error.headers['Retry-After']} s)"
    return text


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message") or "") if isinstance(error, dict) else str(error or "")
