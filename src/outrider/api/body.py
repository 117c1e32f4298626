"""Request bodies: strict JSON in valid UTF-8.

What the server could not write back as JSON or encode as text (numbers read as infinity, half of a surrogate
pair) gets a 400 here instead of a 500 later.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from io import BytesIO
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json

from outrider.api.errors import ApiError, refused
from outrider.api.limits import INT_DIGITS, check_counts, check_values, slices
from outrider.api.openapi import Responses

log = logging.getLogger(__name__)

# A larger body is parsed on a worker thread. Python's lock is held meanwhile: 32 MiB of text take 4 to 90 ms.
LARGE_BODY_BYTES = 32 << 10
NUM_SHOWN = 20  # bytes of a body at which it could not be read

UNSET: tuple[Any, ...] = (None, False, [], {}, "")  # values with no effect

# The parser's words, and ours.
_REASONS = {
    "hex escape": "half of a surrogate pair (\\ud800 to \\udfff) is no character",
    "recursion limit": "it is nested too deeply",
    "number out of range": f"an integer has more than {INT_DIGITS.most} digits",
}
_PLACE = re.compile(r"^(.*) at line (\d+) column (\d+)$")


def parse_json(data: bytes) -> Any:
    check_counts(data)
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise ApiError(400, _why_invalid(data, str(error))) from None
    check_values(value)
    return value


def _why_invalid(data: bytes, message: str) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for part in slices(data):
            decoder.decode(part)
    except UnicodeDecodeError:
        return "the body is not valid UTF-8"
    reason = next((ours for theirs, ours in _REASONS.items() if theirs in message), None)
    if reason is None and (place := _PLACE.match(message)):
        what, line, column = place[1], int(place[2]), int(place[3])
        line_of_data = next(islice(BytesIO(data), line - 1, None), b"")
        shown = line_of_data[max(0, column - 1) :][:NUM_SHOWN].decode(errors="replace").strip()
        reason = f"{what} (line {line}, column {column}{f', at {shown!r}' if shown else ''})"
    return f"the body is not valid JSON: {reason or message}"


class JsonRequest(Request):
    async def body(self) -> bytes:
        """Grows as the parts arrive: joining 32 MiB of them at the end stops the event loop for 50 ms."""
        if not hasattr(self, "_received"):
            self._received = bytearray()
            async for part in self.stream():
                self._received += part
        return self._received  # type: ignore[return-value]

    async def json(self) -> Any:
        if not hasattr(self, "_strict_json"):
            data = await self.body()
            is_large = len(data) > LARGE_BODY_BYTES
            self._strict_json = await asyncio.to_thread(parse_json, data) if is_large else parse_json(data)
        return self._strict_json


class JsonRoute(APIRoute):
    """A route that accepts only strict JSON bodies.

    Other content types are refused, because any web page can make a browser send them without a CORS check.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            if request.method == "POST":
                _check_content_type(request.headers.get("content-type", ""))
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


def is_json(content_type: str) -> bool:
    kind = _kind(content_type)
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _check_content_type(content_type: str) -> None:
    if not is_json(content_type):
        kind = _kind(content_type)
        sent = repr(kind) if kind else "missing"
        raise ApiError(415, f"Content-Type must be application/json, and is {sent}")


def json_router(
    tag: str,
    *routes: tuple[str, str, Callable[..., Any], str, Responses],
    route_class: type[JsonRoute] = JsonRoute,
) -> APIRouter:
    """A router of endpoints with JSON bodies. A route is (method, path, endpoint, summary, answers)."""
    router = APIRouter(tags=[tag], route_class=route_class)
    for method, path, endpoint, summary, responses in routes:
        router.add_api_route(
            path, endpoint, methods=[method], summary=summary, response_model=None, responses=responses
        )
    return router


def check_extra(body: BaseModel, refusals: Mapping[str, str]) -> None:
    """Refuse the fields outside the schema that `refusals` names, and log the other ones."""
    extra = body.model_extra or {}
    for name, reason in refusals.items():
        if name in extra and extra[name] not in UNSET:
            raise refused(name, reason)
    unknown = [name for name in extra if name not in refusals]
    if unknown:
        log.info("unknown fields ignored: %s", ", ".join(name[:40] for name in unknown[:20]))
