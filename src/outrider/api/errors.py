"""Errors as clients expect them: OpenAI's JSON shape or Anthropic's, chosen by the route that was asked.

Every 4xx says what was wrong and, where it can, which parameter. A fault of ours is a 500 without details.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from outrider.engine.engine import EngineStopped
from outrider.request import InvalidRequest

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
MAX_NAMED_PROBLEMS = 3  # of a body that does not fit its schema

OPENAI_TYPES = {429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class ApiError(HTTPException):
    """A refusal with its status; `param` is the field at fault, `code` OpenAI's word for the case."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.param = param
        self.code = code


def refused(param: str, reason: str) -> ApiError:
    """A parameter that cannot be honoured, by name."""
    return ApiError(400, f"{param}: {reason}", param=param, code="unsupported_parameter")


def invalid(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param}: {reason}", param=param, code="invalid_value")


class ClientGone(ApiError):
    """The client hung up before its answer was ready; nobody reads this."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED_REQUEST, "the client closed the connection")


def speaks_anthropic(connection: HTTPConnection) -> bool:
    path = connection.scope.get("path", "")
    return path.startswith("/v1/messages") or "anthropic-version" in connection.headers


def openai_error(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, message: str, request_id: str | None = None) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_response(connection: HTTPConnection, error: ApiError) -> JSONResponse:
    """The error as this route's clients read it."""
    request_id = connection.scope.get("state", {}).get("request_id")
    message = str(error.detail)
    if speaks_anthropic(connection):
        body = anthropic_error(error.status_code, message, request_id)
    else:
        body = openai_error(error.status_code, message, error.param, error.code)
    headers = dict(error.headers or {})
    if request_id:  # set here too: errors of the outermost layer pass no other
        headers |= {"x-request-id": request_id, "request-id": request_id}
    return JSONResponse(body, error.status_code, headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, message, headers=error.headers)
    return error_response(request, error)


async def on_bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = list(_problems(error.errors(), error.body))
    shown = "; ".join(f"{where}: {what}" if where else what for where, what in problems[:MAX_NAMED_PROBLEMS])
    left = len(problems) - MAX_NAMED_PROBLEMS
    message = shown + (f" (and {left} more)" if left > 0 else "")
    return error_response(request, ApiError(400, message, param=problems[0][0] or None))


async def on_invalid_request(request: Request, error: Exception) -> Response:
    return error_response(request, ApiError(400, str(error)))


async def on_engine_stopped(request: Request, error: Exception) -> Response:
    return error_response(request, ApiError(503, "the server is shutting down", headers={"Retry-After": "5"}))


async def on_fault(request: Request, error: Exception) -> Response:
    """Ours, not the client's: the traceback is in the log, under the same request id."""
    return error_response(request, ApiError(500, "internal error; the server's log has the details"))


HANDLERS: dict[int | type[Exception], Any] = {
    HTTPException: on_http_error,
    RequestValidationError: on_bad_body,
    InvalidRequest: on_invalid_request,
    EngineStopped: on_engine_stopped,
    Exception: on_fault,
}


def _problems(errors: Sequence[Any], body: Any) -> list[tuple[str, str]]:
    """(where, what) for each, without repeats; alternatives of a union share their place."""
    found: dict[tuple[str, str], None] = {}
    for error in errors:
        where = _place(tuple(error["loc"]), body)
        found[(where, str(error["msg"]))] = None
    return [problem for problem in found if not _is_shadowed(problem[0], found)]


def _is_shadowed(where: str, found: Mapping[tuple[str, str], None]) -> bool:
    """Whether another problem lies deeper in the same place: then that alternative of a union was meant."""
    return bool(where) and any(other.startswith((f"{where}.", f"{where}[")) for other, _ in found)


def _place(loc: tuple[Any, ...], body: Any) -> str:
    """`messages[0].content` from pydantic's path, without the models and tags that it passes through."""
    here, path = body, ""
    steps = loc[1:] if loc and loc[0] in ("body", "query", "path", "header") else loc
    for i, step in enumerate(steps):
        if isinstance(step, int) and isinstance(here, list):
            path += f"[{step}]"
            here = here[step] if step < len(here) else None
        elif isinstance(step, str) and isinstance(here, dict) and (step in here or i == len(steps) - 1):
            path += f".{step}" if path else step
            here = here.get(step)
        elif body is None and isinstance(step, str):
            path += f".{step}" if path else step
    return path
