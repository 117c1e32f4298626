"""ASGI middleware in front of the routes: request id and access log, API key, body size.

Plain ASGI, not Starlette's BaseHTTPMiddleware: the chunks of a stream pass through without buffering.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.api.errors import CLIENT_CLOSED_REQUEST, ApiError, error_response
from outrider.api.keys import ApiKey, ApiKeys
from outrider.api.operations.metrics import Metrics
from outrider.api.rate_limits import KeyUsages, current_usage

log = logging.getLogger("outrider.access")

T = TypeVar("T")

METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/docs", "/openapi.json")  # served without a key
OPERATOR_PATHS = ("/metrics", "/v1/status", "/v1/cache")
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


class RequireKey:
    """Answers 401 unless the request carries a valid key, 403 if it needs an operator's, 429 over a limit.

    The paths in OPEN_PATHS need no key. `keys` is None if the server needs none: then everybody is let in.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, usages: KeyUsages | None = None) -> None:
        self._app = app
        self._keys = keys
        self._usages = usages or KeyUsages()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._keys is None:
            with _set(current_tenant, _sent_key_hash(headers)):
                await self._app(scope, receive, send)
            return
        try:
            key = await self._check(self._keys, scope, headers)
            usage = self._usages.of(key)
            if scope["method"] == "POST":
                usage.count_request()
        except ApiError as error:
            await error_response(HTTPConnection(scope), error)(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(usage.headers())
            await send(message)

        with _set(current_tenant, key.name), _set(current_usage, usage):
            await self._app(scope, receive, send_with_limits)

    async def _check(self, keys: ApiKeys, scope: Scope, headers: Headers) -> ApiKey:
        found = [key for sent in _sent_keys(headers) if (key := await keys.find(sent)) is not None]
        if not found:
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if scope["path"] in OPERATOR_PATHS and not found[0].is_operator:
            raise ApiError(
                403,
                f"{scope['path']} needs an operator's key, and {found[0].name!r} is a user's key",
                code="operator_key_required",
            )
        return found[0]


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


def _sent_key_hash(headers: Headers) -> str:
    """A hash of the key that the client sent; "" without a key.

    This server does not check the key. A proxy in front of it may have done so, and then tells clients apart.
    """
    x_api_key, bearer = _sent_keys(headers)
    key = x_api_key or bearer
    return hashlib.sha256(key.encode()).hexdigest()[:32] if key else ""


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _sent_keys(headers: Headers) -> tuple[str, str]:
    """The keys in x-api-key and in Authorization: Bearer; "" for a missing one."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""
