"""ASGI middleware that lets in who has a key, and knows for the rest of the request whose it is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.api.errors import ApiError, error_response
from outrider.api.keys import ApiKey, ApiKeys
from outrider.api.middleware import KEY_NAME, current_tenant, is_open
from outrider.api.rate_limits import KeyUsages, current_usage

T = TypeVar("T")

OPERATOR_PATHS = ("/metrics", "/v1/status", "/v1/status/stream", "/v1/cache", "/v1/adapters")
OPERATOR_PATTERN = re.compile(r"/v1/models/.+/(load|unload)|/v1/adapters/.*")


def is_operators(path: str) -> bool:
    return path in OPERATOR_PATHS or OPERATOR_PATTERN.fullmatch(path) is not None


class RequireKey:
    """Answers 401 unless the request carries a valid key, 403 if it needs an operator's, 429 over a limit.

    Open paths (`is_open`) need no key. `keys` is None if the server needs none: then everybody is let in.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys
        self._usages = KeyUsages()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._keys is None:
            with _set(current_tenant, _sent_key_hash(headers)):
                await self._app(scope, receive, send)
            return
        try:
            key = await _valid_key(self._keys, headers)
        except ApiError as error:
            await error_response(HTTPConnection(scope), error)(scope, receive, send)
            return
        scope.setdefault("state", {})[KEY_NAME] = key.name
        usage = self._usages.of(key)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(usage.headers())
            await send(message)

        try:
            usage.count_request()
            _check_is_allowed(key, scope["path"])
        except ApiError as error:
            await error_response(HTTPConnection(scope), error)(scope, receive, send_with_limits)
            return
        with _set(current_tenant, key.name), _set(current_usage, usage):
            await self._app(scope, receive, send_with_limits)


async def _valid_key(keys: ApiKeys, headers: Headers) -> ApiKey:
    for sent in _sent_keys(headers):
        if (key := await keys.find(sent)) is not None:
            return key
    raise ApiError(
        401,
        "the API key is missing or wrong: send it as Authorization: Bearer KEY, or as x-api-key",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _check_is_allowed(key: ApiKey, path: str) -> None:
    if is_operators(path) and not key.is_operator:
        raise ApiError(
            403,
            f"{path} needs an operator's key, and {key.name!r} is a user's key",
            code="operator_key_required",
            reason="operator_key",
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
