"""ASGI middleware against web pages that use a visitor's browser to reach this server.

- DNS rebinding: a page at evil.example lets that name point to 127.0.0.1. For the browser both are one site,
  so the page may read answers. Its requests carry `Host: evil.example`, and are refused by that.
- Cross-site requests: a page sends a request whose answer it may not read. Browsers mark such requests by
  Sec-Fetch-Site or Origin.

curl and the SDKs send neither header, and name the server by an address or a name that the operator knows.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.api.errors import ApiError, error_response
from outrider.api.settings import ServerSettings

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # change nothing: a page may send them, and cannot read the answer
OPEN_PREFIX = "/health"  # load balancers probe with any Host; the answer has no secrets
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(?::\d{0,5})?")


class HostNames:
    """The names under which clients may reach the server.

    An IP address is always allowed: a page can only rebind a name that its owner controls.
    """

    def __init__(self, names: Iterable[str]) -> None:
        listed = {name.lower().rstrip(".") for name in names}
        self._allows_all = "*" in listed
        self._names = listed
        self._suffixes = tuple(name[1:] for name in listed if name.startswith("*."))

    def __contains__(self, host: object) -> bool:
        """`host`: a Host header, with or without a port."""
        match = HOST.fullmatch(str(host).lower())
        if self._allows_all or match is None:
            return self._allows_all
        name = match.group(1).rstrip(".")
        return name in self._names or name.endswith(self._suffixes) or _is_address(name)


def host_names(settings: ServerSettings) -> HostNames:
    """localhost, --host, --allowed-hosts, and the machine's own name if other machines reach the server."""
    names = ["localhost", "*.localhost", settings.host, *settings.allowed_hosts]
    if not settings.is_loopback:
        own = socket.gethostname()
        short = own.partition(".")[0]
        names += [own, short, f"{short}.local"]  # .local: the name by multicast DNS, which macOS announces
    return HostNames(names)


class HostCheck:
    """Answers 403 to a Host that is no name of this server, and to foreign pages that change something."""

    def __init__(self, app: ASGIApp, names: HostNames, origins: Sequence[str]) -> None:
        self._app = app
        self._names = names
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(HTTPConnection(scope), error)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        # HTTP/1.0 knows no Host header. Every browser sends one.
        foreign = [host for host in headers.getlist("host") if host and host not in self._names]
        if foreign and not scope["path"].startswith(OPEN_PREFIX):
            return ApiError(
                403,
                f"the Host header says {foreign[0][:100]!r}, which is not a name of this server. If clients "
                "use this name, start the server with --allowed-hosts NAME",
                code="host_not_allowed",
                reason="host",
            )
        if scope["method"] not in SAFE_METHODS and _is_cross_site(headers, self._origins):
            origin = headers.get("origin", "another site")
            return ApiError(
                403,
                f"a web page of {origin[:100]!r} sent this request. If its pages may use this server, start "
                "the server with --cors-origin ORIGIN",
                code="origin_not_allowed",
                reason="origin",
            )
        return None


def _is_cross_site(headers: Headers, allowed_origins: Sequence[str]) -> bool:
    origin = headers.get("origin")
    if origin is not None and ("*" in allowed_origins or origin in allowed_origins):
        return False
    site = headers.get("sec-fetch-site")  # a page cannot set it; older browsers and plain HTTP lack it
    if site is not None:
        return site not in ("same-origin", "none")
    # The scheme is not compared: behind a proxy with TLS the server gets http.
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
