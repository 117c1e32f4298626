"""Request bodies: strict JSON in valid UTF-8.

Python's json module accepts NaN and lone surrogates, and reads 1e999 as infinity. The server could not write
them back as JSON or encode them as text, and would fail with a 500 later. So they get a 400 here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from outrider.api.errors import ApiError, refused
from outrider.api.limits import check_counts, check_depth, parse_int, slices
from outrider.api.openapi import Responses
from outrider.chat.json_text import parse_float, refuse_constant

log = logging.getLogger(__name__)

# A larger body is parsed on a worker thread. Measured: 32 MiB take 0.2 s; 32 KiB of zeros take 3 ms.
LARGE_BODY_BYTES = 32 << 10

UNSET: tuple[Any, ...] = (None, False, [], {}, "")  # values with no effect


def parse_json(data: bytes) -> Any:
    check_counts(data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, parse_constant=refuse_constant, parse_float=parse_float, parse_int=parse_int)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ApiError(400, f"the body is not valid JSON: {error.msg} ({where})") from None
    except RecursionError:
        raise ApiError(400, "the body is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    check_depth(value)
    if any(b"\\ud" in part or b"\\uD" in part for part in slices(data, overlap=2)):
        _refuse_lone_surrogates(value)
    return value


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(
            400, "the body has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
        ) from None


class JsonRequest(Request):
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
