"""The live page: static files from gateway/web. They hold no data, so they need no key; what they ask for does."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter()

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere is loaded or asked, no inline scripts run, and no other site may frame the page.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class WebFile:
    """One file of the page."""

    content: bytes
    media_type: str
    etag: str


def load_files() -> dict[str, WebFile]:
    """The page's files by name."""
    found = {}
    for item in resources.files("gateway").joinpath("web").iterdir():
        suffix = "." + item.name.rpartition(".")[2]
        if suffix in TYPES and item.is_file():
            content = item.read_bytes()
            etag = f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'
            found[item.name] = WebFile(content, TYPES[suffix], etag)
    return found


_FILES = load_files()


def answer(request: Request, name: str) -> Response:
    """One file. Raises HTTPException 404."""
    file = _FILES.get(name)
    if file is None:
        raise HTTPException(404)
    headers = {**HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers={**headers, "content-type": file.media_type})


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    return answer(request, "index.html")


@router.get("/web/{name}", include_in_schema=False)
async def web_file(name: str, request: Request) -> Response:
    return answer(request, name)
