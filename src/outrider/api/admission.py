"""Admission: limits what all API requests hold together, each until the end of its answer.

Three sums are limited: engine requests (one per answer), bytes of bodies, and tokens of prompts. A request
reserves its part of a sum before the server works on that part. Used from the event loop only.

If no place is free when the headers of a request arrive, it is refused. Otherwise it takes its place when its
body is complete: clients that send slowly keep nobody out.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.api.errors import ApiError, error_response
from outrider.api.keys import ApiKey
from outrider.api.load import WORDS, Load, LoadLimit
from outrider.api.middleware import current_tenant
from outrider.api.rate_limits import KeyUsage, current_usage
from outrider.api.settings import ServerSettings

# By field of Load: the flags that set its limit.
FLAGS = {
    "num_requests": "--max-rows + --max-queue",
    "num_bytes": "--max-live-bytes",
    "num_tokens": "--max-live-tokens",
}
REASONS = {"num_requests": "queue_full", "num_bytes": "live_bytes", "num_tokens": "live_tokens"}  # of a 429


class Reservation:
    """What one API request holds. Call `add` before it needs more, and `release` at its end."""

    def __init__(self, admission: Admission, tenant: str, usage: KeyUsage | None = None) -> None:
        self.tenant = tenant
        self.usage = usage or KeyUsage(ApiKey(tenant))  # of the key's own limits
        self.held = Load()
        self._admission = admission

    def add(self, num_requests: int = 0, num_bytes: int = 0, num_tokens: int = 0) -> None:
        """Raises ApiError: 429 if there is no room now, 400 if there will never be."""
        more = Load(num_requests, num_bytes, num_tokens)
        self._admission.check(self, more)
        self.usage.hold(self.held, more)
        self.usage.count_tokens(num_tokens)
        self.held += more
        self._admission.held += more

    def allow_prompt_of(self, num_tokens: int) -> None:
        self._admission.allow_prompt_of(num_tokens)

    def release(self) -> None:
        """Give everything back. A second call has no effect."""
        self._admission.held -= self.held
        self.usage.release(self.held)
        self.held = Load()


class Admission:
    """The sum of all reservations, and its limit."""

    def __init__(self, limit: LoadLimit, retry_after_s: int = 2) -> None:
        self.limit = limit
        self.held = Load()
        self.is_draining = False
        self._headers = {"Retry-After": str(retry_after_s)}

    def allow_prompt_of(self, num_tokens: int) -> None:
        """One prompt of a loaded model always fits, however long it may be."""
        if self.limit.num_tokens is not None and num_tokens > self.limit.num_tokens:
            self.limit = replace(self.limit, num_tokens=num_tokens)

    def open(self, tenant: str = "", usage: KeyUsage | None = None) -> Reservation:
        """A place for one request. Raises ApiError: 503 during a shutdown, 429 if the server is full."""
        if self.is_draining:
            headers = self._headers | {"Connection": "close"}
            raise ApiError(503, "the server is shutting down", headers=headers)
        reservation = Reservation(self, tenant, usage)
        reservation.add(num_requests=1)
        return reservation

    def check(self, reservation: Reservation, more: Load) -> None:
        """Raise ApiError if the reservation cannot hold `more`."""
        if name := (reservation.held + more).excess(self.limit):
            num, limit = getattr(reservation.held + more, name), getattr(self.limit, name)
            raise ApiError(
                400,
                f"this request alone needs {num:,} {WORDS[name]}, and this server takes {limit:,} "
                f"({FLAGS[name]}): ask for less",
            )
        if name := (self.held + more).excess(self.limit):
            num, limit = getattr(self.held, name), getattr(self.limit, name)
            raise ApiError(
                429,
                f"the server is busy: {num:,} {WORDS[name]}, of at most {limit:,}. Try again later.",
                code="rate_limit_exceeded",
                headers=self._headers,
                reason=REASONS[name],
            )


def admission_of(settings: ServerSettings) -> Admission:
    limit = LoadLimit(
        settings.max_rows + settings.max_queue, settings.max_live_bytes, settings.max_live_tokens
    )
    return Admission(limit, settings.retry_after_s)


# Set for the time of one POST request.
current_reservation: ContextVar[Reservation] = ContextVar("current_reservation")


class Admit:
    """Middleware: every POST holds a reservation until its response is sent or its client is gone."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            reservation = self._admission.open(current_tenant.get(), current_usage.get())
        except ApiError as error:
            await error_response(HTTPConnection(scope), error)(scope, receive, send)
            return
        reservation.release()  # taken again when the body is complete
        token = current_reservation.set(reservation)

        async def receive_counted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                is_last = not message.get("more_body", False)
                reservation.add(num_requests=int(is_last), num_bytes=len(message.get("body", b"")))
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            current_reservation.reset(token)
            reservation.release()
