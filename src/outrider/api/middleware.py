"""What happens to every request before a route sees it: its id and log line, its key, the size of its body.

Plain ASGI, so that streams pass through untouched.
"""

from __future__ import annotations

import hmac
import logging
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.api.errors import CLIENT_CLOSED_REQUEST, ApiError, error_response
from outrider.api.operations.metrics import Metrics
from outrider.api.request_id import current_request_id, request_id_for
from outrider.api.tenant import current_tenant, tenant_of

log = logging.getLogger("outrider.access")

METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")
OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/docs", "/openapi.json")


class RequestLog:
    """Outermost: names the request, writes one line when it is over, counts it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_for(Headers(scope=scope).get("x-request-id", ""))
        scope.setdefault("state", {})["request_id"] = request_id
        status, started_s = CLIENT_CLOSED_REQUEST, time.perf_counter()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id
            await send(message)

        token = current_request_id.set(request_id)
        tenant_token = current_tenant.set(tenant_of(Headers(scope=scope)))
        try:
            await self._app(scope, receive, send_named)
        except Exception:
            status = 500
            raise
        finally:
            self._close(scope, status, time.perf_counter() - started_s)
            current_request_id.reset(token)
            current_tenant.reset(tenant_token)

    def _close(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._metrics.http.labels(route, method, str(status)).inc()
        self._metrics.http_s.labels(route).observe(seconds)
        level = logging.DEBUG if route in OPEN_PATHS or route == "/metrics" else logging.INFO
        log.log(level, "%s %s %d %.0f ms", scope["method"], scope["path"], status, seconds * 1000)


class RequireKey:
    """Bearer or x-api-key, compared in constant time. Health and the API's description are open."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(HTTPConnection(scope), error)(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        matches = [hmac.compare_digest(key.encode(), self._api_key) for key in given]  # both, always
        return any(matches)


class BodyLimit:
    """413 for bodies over the limit: at once if they say their size, else when it is reached."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await error_response(HTTPConnection(scope), self._error())(scope, receive, send)
            return
        num_bytes = 0

        async def receive_some() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, receive_some, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes:,} bytes", code="request_too_large")
