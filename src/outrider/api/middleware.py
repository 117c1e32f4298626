"""ASGI middleware in front of the routes: request id and access log, limits of what a client sends.

Plain ASGI, not Starlette's BaseHTTPMiddleware: the chunks of a stream pass through without buffering.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.api.errors import CLIENT_CLOSED_REQUEST, REFUSAL, ApiError, ClientGone, error_response
from outrider.api.operations.metrics import Metrics
from outrider.api.request_summary import text_of
from outrider.api.settings import ServerSettings

log = logging.getLogger("outrider.access")

METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
# Served without a key. The pages' files (PAGE_PREFIX) hold no data.
OPEN_PATHS = ("/", "/docs", "/openapi.json", "/health", "/health/live", "/health/ready")
PAGE_PREFIX = "/page/"
KEY_NAME = "key_name"  # key of the request's state (scope["state"]): the name of its API key, for the log
SUMMARY = "answers"  # key of the request's state: see api/request_summary.py
LOGGABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

# Of the headers of a request. Chosen by hand: common servers allow 8 to 32 KiB.
MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 << 10
MAX_URL_BYTES = 8 << 10
MIN_BODY_RATE = 32 << 10  # bytes/s of a long body; chosen by hand: a slow mobile uplink

# Set for the time of one HTTP request.
current_request_id: ContextVar[str] = ContextVar("current_request_id", default="-")
# Whose request it is: the name of its API key, or a hash of the key that it sent if the server needs none.
# Tenants share no cached prefixes, no cached images and no stored responses.
current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
_current_state: ContextVar[dict[str, Any] | None] = ContextVar("_current_state", default=None)


def is_open(path: str) -> bool:
    """True for a path that needs no key."""
    return path in OPEN_PATHS or path.startswith(PAGE_PREFIX)


def note_refusal(reason: str) -> None:
    """Name the reason why the current request fails, for the log and the metrics. The first reason stays."""
    state = _current_state.get()
    if state is not None:
        state.setdefault(REFUSAL, reason)


def note_answers(summary: dict[str, Any]) -> None:
    """What the current request did, for its line in the log."""
    state = _current_state.get()
    if state is not None:
        state[SUMMARY] = summary


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
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status, started_s, is_complete = CLIENT_CLOSED_REQUEST, time.perf_counter(), False

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)
            elif message["type"] == "http.response.start":
                status = message["status"]
                response_headers = MutableHeaders(scope=message)
                response_headers["x-request-id"] = response_headers["request-id"] = request_id
            await send(message)

        id_token = current_request_id.set(request_id)
        state_token = _current_state.set(state)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status, is_complete = 500, True
            raise
        finally:
            if not is_complete:  # the client left, or did not read, in the middle of its answer
                status = CLIENT_CLOSED_REQUEST
            self._count_and_log(scope, status, time.perf_counter() - started_s)
            _current_state.reset(state_token)
            current_request_id.reset(id_token)

    def _count_and_log(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.http.labels(route, method, str(status)).inc()
        self._metrics.http_s.labels(route).observe(seconds)
        reason = scope["state"].get(REFUSAL) or ("client_closed" if status == CLIENT_CLOSED_REQUEST else None)
        if reason not in (None, "client_closed", "fault"):
            self._metrics.refusals.labels(reason).inc()
        level = logging.DEBUG if is_open(route) or route == "/metrics" else logging.INFO
        fields = {
            "method": scope["method"],
            "path": scope["path"],
            "route": route,
            "status": status,
            "duration_s": round(seconds, 6),
            "key": scope["state"].get(KEY_NAME),
            "reason": reason,
        }
        shown = f" ({reason})" if reason else ""
        if (summary := scope["state"].get(SUMMARY)) is not None:
            fields |= summary
            shown = f": {text_of(summary)}{shown}"
        text = "%s %s %d %.0f ms%s"
        extra = {"fields": fields}
        log.log(level, text, scope["method"], scope["path"], status, seconds * 1000, shown, extra=extra)


class RequestLimits:
    """Limits of what one request sends: size of its headers and of its body, time of its body.

    The body of a request that is refused for its headers is not read.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
        except ApiError as error:
            await error_response(HTTPConnection(scope), error)(scope, receive, send)
            return
        body = _Body(self._settings.body_timeout_s)

        async def receive_limited() -> Message:
            try:
                async with asyncio.timeout_at(body.deadline_s):
                    message = await receive()
            except TimeoutError:
                raise self._body_timeout(body) from None
            self._count(body, message)
            return message

        await self._app(scope, receive_limited, send)

    def _check_headers(self, scope: Scope) -> None:
        num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
            raise ApiError(
                431, f"the headers exceed {MAX_HEADERS} headers or {MAX_HEADER_BYTES:,} bytes: send fewer"
            )
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL_BYTES:
            raise ApiError(414, f"the URL is longer than {MAX_URL_BYTES:,} bytes")
        if not scope["path"].isprintable():  # a route would also match its path with a newline at the end
            raise ApiError(404, "the path has control characters")
        content_length = Headers(scope=scope).get("content-length", "")
        if content_length.isdigit() and int(content_length) > self._settings.max_body_bytes:
            raise self._too_large()

    def _count(self, body: _Body, message: Message) -> None:
        if message["type"] == "http.disconnect" and not body.is_complete:
            raise ClientGone
        body.received(message)
        if body.num_bytes > self._settings.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        limit = f"{self._settings.max_body_bytes:,} bytes, the limit of this server (--max-body)"
        return ApiError(413, f"the body is larger than {limit}", code="request_too_large")

    def _body_timeout(self, body: _Body) -> ApiError:
        return ApiError(
            408,
            f"the body did not arrive in time: {body.num_bytes:,} bytes came. A client may be at most "
            f"{self._settings.body_timeout_s:g} s (--body-timeout) slower than {MIN_BODY_RATE:,} bytes/s",
            headers={"Connection": "close"},
            reason="body_timeout",
        )


class _Body:
    """The body of one request while it arrives.

    Each MIN_BODY_RATE bytes give the client one second more, but never more than `timeout_s` from now: who
    sends much at once may not rest on it, since the server holds what it has received.
    """

    def __init__(self, timeout_s: float) -> None:
        self.num_bytes = 0
        self._timeout_s = timeout_s
        self._now_s = asyncio.get_running_loop().time
        self.deadline_s: float | None = self._now_s() + timeout_s  # None: it is complete

    @property
    def is_complete(self) -> bool:
        return self.deadline_s is None

    def received(self, message: Message) -> None:
        num_bytes = len(message.get("body", b""))
        self.num_bytes += num_bytes
        if not message.get("more_body", False):
            self.deadline_s = None
        elif self.deadline_s is not None:
            later_s = self.deadline_s + num_bytes / MIN_BODY_RATE
            self.deadline_s = min(later_s, self._now_s() + self._timeout_s)
