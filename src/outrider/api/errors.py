"""Errors in the JSON shape of the requested API: OpenAI's, Anthropic's or Ollama's.

A 4xx names the problem and, if possible, the parameter. A fault of the server is a 500 without details.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response

from outrider.engine.adapters import UnknownAdapter
from outrider.engine.engine import EngineStopped
from outrider.isolation.worker import WorkerUnavailable
from outrider.pool.errors import LoadFailed, ModelPinned, ModelTooLarge, PoolClosed, PoolError
from outrider.request import InvalidRequest, PromptTooLong

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status code
MAX_SHOWN_PROBLEMS = 3  # schema errors that one message lists; chosen by hand
MAX_SHOWN_CHARACTERS = 200  # of an error's path and text, which may contain the client's own; chosen by hand

OLLAMA_PREFIX = "/api/"  # of all of Ollama's routes

REFUSAL = "refusal"  # key of the request's state (scope["state"]): why it was refused, for log and metrics
REASONS = {  # by status, for errors that name no reason
    400: "invalid_request",
    401: "api_key",
    403: "forbidden",
    404: "not_found",
    405: "method",
    409: "conflict",
    413: "body_size",
    414: "headers",
    415: "content_type",
    429: "queue_full",
    431: "headers",
    499: "client_closed",
    503: "shutting_down",
}
OPENAI_TYPES = {429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    408: "timeout_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ApiError(HTTPException):
    """An HTTP error. `param` is the field at fault; `code` is OpenAI's machine-readable name of the error.

    `reason` is the label of the error in the log and in outrider_refusals_total. `anthropic_message`
    replaces the message in Anthropic's API, where `details` is further data for clients.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
        anthropic_message: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.reason = reason or REASONS.get(status, "fault" if status >= 500 else "other")
        self.param = param
        self.code = code
        self.anthropic_message = anthropic_message or message
        self.details = details


def context_exceeded(error: PromptTooLong) -> ApiError:
    """Clients that compact a conversation find this error by the code and the messages: keep the words."""
    problem = str(error)
    problem = problem[0].upper() + problem[1:]
    return ApiError(
        400,
        f"This model's maximum context length is {error.max_tokens} tokens. {problem}.",
        code="context_length_exceeded",
        anthropic_message=f"prompt is too long: {error.size} > {error.max_tokens - 1} maximum",
    )


def refused(param: str, reason: str) -> ApiError:
    """A parameter, or a value of it, that this server does not support."""
    return ApiError(400, f"{param}: {reason}", param=param, code="unsupported_parameter")


def invalid(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param}: {reason}", param=param, code="invalid_value")


def internal_error(request_id: str) -> ApiError:
    """A fault of the server. Its details are in the log only, under the same request id."""
    return ApiError(500, f"internal error: the server's log has the details (request id {request_id})")


class ClientGone(ApiError):
    """The client closed the connection before its answer was ready. No client receives this error."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED_REQUEST, "the client closed the connection")


def openai_error(error: ApiError) -> dict[str, Any]:
    status = error.status_code
    kind = OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": error.detail, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    status = error.status_code
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    found: dict[str, Any] = {"type": kind, "message": error.anthropic_message}
    if error.details is not None:
        found["details"] = dict(error.details)
    return {"type": "error", "error": found, "request_id": request_id}


def ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": error.detail}


def error_response(connection: HTTPConnection, error: ApiError) -> JSONResponse:
    """The error in the JSON shape of the requested API. Notes its reason for the log and the metrics."""
    state = connection.scope.setdefault("state", {})
    state.setdefault(REFUSAL, error.reason)
    request_id = state.get("request_id")
    path = connection.scope.get("path", "")
    if path.startswith(OLLAMA_PREFIX):
        body = ollama_error(error)
    elif path.startswith("/v1/messages") or "anthropic-version" in connection.headers:
        body = anthropic_error(error, request_id)
    else:
        body = openai_error(error)
    headers = dict(error.headers or {})
    if request_id:  # Starlette answers a 500 outside of RequestLog, which would set these headers
        headers |= {"x-request-id": request_id, "request-id": request_id}
    return JSONResponse(body, error.status_code, headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers or {})
        path = getattr(request.scope.get("route"), "path", None)
        if error.status_code == 405 and path in request.app.state.methods:
            headers["Allow"] = ", ".join(sorted(request.app.state.methods[path]))
        error = ApiError(error.status_code, message, headers=headers)
    return error_response(request, error)


async def on_bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = list(_problems(error.errors(), error.body))
    shown = "; ".join(f"{path}: {text}" if path else text for path, text in problems[:MAX_SHOWN_PROBLEMS])
    num_hidden = len(problems) - MAX_SHOWN_PROBLEMS
    message = shown + (f" (and {num_hidden} more)" if num_hidden > 0 else "")
    return error_response(request, ApiError(400, message, param=problems[0][0] or None))


def api_error_of(error: Exception, request_id: str) -> ApiError:
    """What a client is told about an exception."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return context_exceeded(error)
        case UnknownAdapter():
            return ApiError(404, str(error), param="adapter", code="adapter_not_found")
        case InvalidRequest():
            return ApiError(400, str(error))
        case EngineStopped() | PoolClosed():
            return ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
        case ModelPinned():
            return ApiError(409, str(error), code="model_pinned")
        case ModelTooLarge():
            return ApiError(400, str(error), param="model", code="model_too_large", reason="model_too_large")
        case LoadFailed():  # the header is for SDKs: a second try would not help
            headers = {"x-should-retry": "false", "Retry-After": "30"}
            return ApiError(503, str(error), code="model_load_failed", headers=headers, reason="model_load")
        case WorkerUnavailable():
            log.error("a grammar or an image could not be processed: %s", error)
            return ApiError(
                503,
                "the child process that reads grammars or images could not be started or was killed: "
                "try again",
                headers={"Retry-After": "5"},
                reason="child_process",
            )
        case _:
            log.error("a request failed", exc_info=error)
            return internal_error(request_id)


async def on_known_error(request: Request, error: Exception) -> Response:
    return error_response(request, api_error_of(error, request.scope.get("state", {}).get("request_id", "-")))


async def on_fault(request: Request, error: Exception) -> Response:
    """An exception that nothing else handles. The log has its traceback, with the same request id."""
    return error_response(request, internal_error(request.scope.get("state", {}).get("request_id", "-")))


HANDLERS: dict[int | type[Exception], Any] = {
    HTTPException: on_http_error,
    RequestValidationError: on_bad_body,
    InvalidRequest: on_known_error,
    EngineStopped: on_known_error,
    PoolError: on_known_error,
    WorkerUnavailable: on_known_error,
    Exception: on_fault,
}


def _problems(errors: Sequence[Any], body: Any) -> list[tuple[str, str]]:
    """(path, message) of each schema error, without duplicates.

    Pydantic reports an error for every member of a union. An error deeper inside a field shows which member
    the client meant, so errors at the field itself are dropped.
    """
    found = list(
        dict.fromkeys(
            (_path(tuple(error["loc"]), body)[:MAX_SHOWN_CHARACTERS], error["msg"][:MAX_SHOWN_CHARACTERS])
            for error in errors
        )
    )
    outer = {path[:end] for path, _ in found for end in _ends_of_outer_fields(path)}
    return [(path, message) for path, message in found if path not in outer]


def _ends_of_outer_fields(path: str) -> list[int]:
    """Where the paths of the fields around a field end: `a[0].b` is in `a[0]` and in `a`."""
    return [at for at, character in enumerate(path) if at and character in ".["]


def _path(loc: tuple[Any, ...], body: Any) -> str:
    """`messages[0].content` from pydantic's location, without the model names and tags in it."""
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
