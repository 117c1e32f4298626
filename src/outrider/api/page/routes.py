"""GET / and /docs: web pages whose files are part of the package. No file comes from another origin.

At / a client that does not ask for a page gets a line of text instead: Ollama's clients look for it.

The files are read once, when the server starts. They are readable without a key; the data that the pages show
comes from the API, with the key that the visitor enters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from outrider.api.errors import ApiError

RUNNING = "Ollama is running"  # what Ollama answers; some clients compare it to the letter
STATIC = Path(__file__).parent / "static"
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# data: pictures that the visitor attaches. Everything else comes from this server, no script or style is
# written into the HTML, and no other page may frame this one.
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # a browser asks again each time, and gets a 304 unless the file has changed
}


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    content_type: str
    etag: str


@cache
def static_files(folder: Path = STATIC) -> dict[str, StaticFile]:
    """All files of the page, by their path below `folder`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in CONTENT_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            name = path.relative_to(folder).as_posix()
            found[name] = StaticFile(content, CONTENT_TYPES[path.suffix], etag)
    return found


def root_router(serves_page: bool) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    page = static_files()["index.html"] if serves_page else None

    @router.api_route("/", methods=["GET", "HEAD"])
    async def root(request: Request) -> Response:
        wants_page = "text/html" in request.headers.get("accept", "").lower()  # as every browser does
        if page is not None and wants_page:
            response = _response(page, request)
        else:
            response = PlainTextResponse(RUNNING, headers=HEADERS)
        response.headers["vary"] = "accept"
        return response

    return router


def page_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = static_files()

    @router.api_route("/docs", methods=["GET", "HEAD"])
    async def docs(request: Request) -> Response:
        return _response(files["docs.html"], request)

    @router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
    async def static(name: str, request: Request) -> Response:
        if name not in files:
            raise ApiError(404, "the page has no such file")
        return _response(files[name], request)

    return router


def _response(file: StaticFile, request: Request) -> Response:
    headers = HEADERS | {"etag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers | {"content-type": file.content_type})
