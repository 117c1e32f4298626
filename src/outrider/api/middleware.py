"""ASGI middleware in front of the routes: request id and access log, body size.

Plain ASGI, not Starlette's BaseHTTPMiddleware: the chunks of a stream pass through without buffering.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.api.errors import CLIENT_CLOSED_REQUEST, ApiError, error_response
from outrider.api.operations.metrics import Metrics

log = logging.getLogger("outrider.access")

METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/docs", "/openapi.json")  # served without a key
LOGGABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# Set for the time of one HTTP request.
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="-")
# Whose request it is: the name of its API key, or a hash of the key that it sent if the server needs none.
# Tenants share no cached prefixes, no cached images and no stored responses.
current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")


class RequestIdFilter(logging.Filter):
    """Adds the id of the current request to every log record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = current_request_id.get()
        return True


class RequestLog:
    """The outermost middleware: gives the request its id, counts it and logs one line when it ends."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        request_id = client_id if LOGGABLE_ID.fullmatch(client_id) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        status, started_s = CLIENT_CLOSED_REQUEST, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                response_headers["x-request-id"] = response_headers["request-id"] = request_id
            await send(message)

        id_token = current_request_id.set(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = 500
            raise
        finally:
            self._count_and_log(scope, status, time.perf_counter() - started_s)
            current_request_id.reset(id_token)

    def _count_and_log(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.http.labels(route, method, str(status)).inc()
        self._metrics.http_s.labels(route).observe(seconds)
        level = logging.DEBUG if route in OPEN_PATHS or route == "/metrics" else logging.INFO
        log.log(level, "%s %s %d %.0f ms", scope["method"], scope["path"], status, seconds * 1000)


class BodyLimit:
    """Answers 413 to a body over the limit: at once if Content-Length is over it, else during the upload."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_length = Headers(scope=scope).get("content-length", "")
        if content_length.isdigit() and int(content_length) > self._max_bytes:
            await error_response(HTTPConnection(scope), self._error())(scope, receive, send)
            return
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, receive_counted, send)

    def _error(self) -> ApiError:
        return ApiError(
            413,
            f"the body is larger than {self._max_bytes:,} bytes, the limit of this server (--max-body)",
            code="request_too_large",
        )
