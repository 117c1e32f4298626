"""/openapi.json: what the routes answer. FastAPI describes the requests from their models.

All of this is description only: no answer is validated while the server runs. tests/api/test_openapi.py
compares the answers with the description.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any, Literal, NotRequired

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from outrider.api.errors import OLLAMA_PREFIX
from outrider.api.host_check import OPEN_PREFIX

Responses = dict[int | str, dict[str, Any]]

COMPONENT = "#/components/schemas/{model}"
NDJSON = "application/x-ndjson"  # lines of JSON

# Error answers, by status. `_statuses` says which of them a route has.
ERRORS = {
    400: "The request is wrong: the message says what to change.",
    401: "The API key is missing or wrong.",
    403: "The key, the Host header or the web page that sends the request may not do this.",
    404: "What the request names does not exist on this server.",
    408: "The body came too slowly.",
    409: "Something is in the way for now, such as a pinned model: the message says what.",
    413: "The body is larger than this server accepts.",
    414: "The URL is longer than this server accepts.",
    415: "The body is not sent as JSON.",
    429: "The server is busy: try again after the seconds in Retry-After.",
    431: "The headers are larger than this server accepts.",
    500: "A fault of the server: its log has the details under the request id.",
    503: "The server stops, its engine has stopped, the model could not be loaded, or a child process was "
    "killed: try again after the seconds in Retry-After.",
    504: "The request did not end within its time limit.",
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds", "required": True, "schema": {"type": "integer"}}}
RETRIABLE = (429, 503)

SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


class OpenAIErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    error: OpenAIErrorDetail


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str
    details: NotRequired[dict[str, Any]]


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class OllamaError(TypedDict):
    error: str


# -- for the routes --------------------------------------------------------------------------------------


def answer(model: Any, *, event: Any = None, ends_with_done: bool = False, line: Any = None) -> Responses:
    """The `responses` argument of a route that answers with `model`; None: only with a stream.

    `event`: what a stream's events carry. `ends_with_done`: the stream's last event is OpenAI's [DONE].
    `line`: each line of a stream of lines.
    """
    content: dict[str, Any] = {}
    if model is not None:
        content["application/json"] = {"schema": _schema_of(model)}
    if event is not None:
        carried: dict[str, Any] = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": _schema_of(event),
        }
        data = {"anyOf": [carried, {"const": "[DONE]"}]} if ends_with_done else carried
        properties = {"event": {"type": "string"}, "data": data}
        item = {"type": "object", "properties": properties, "required": ["data"]}
        content["text/event-stream"] = {"itemSchema": item}
    if line is not None:
        content[NDJSON] = {"itemSchema": _schema_of(line)}
    return {200: {"content": content}}


@functools.cache
def _schema_of(model: Any) -> dict[str, Any]:
    """The model as JSON Schema. All documents share it: `describe` copies it before it changes anything."""
    return TypeAdapter(model).json_schema(ref_template=COMPONENT)


# -- the document ----------------------------------------------------------------------------------------


def describe(app: FastAPI, *, needs_key: bool, open_paths: tuple[str, ...]) -> None:
    """Make `app` serve the completed document. `open_paths` need no key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            own = copy.deepcopy(document)
            app.openapi_schema = _whole(_completed(own, open_paths if needs_key else None))
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(document: dict[str, Any], open_paths: tuple[str, ...] | None) -> dict[str, Any]:
    """`open_paths`: None if no route needs a key."""
    schemas = document["components"]["schemas"]
    for unused in (
        "HTTPValidationError",
        "ValidationError",
    ):  # of FastAPI's error answers, not of ours
        schemas.pop(unused, None)
    for model in (OpenAIError, AnthropicError, OllamaError):
        schema = TypeAdapter(model).json_schema(ref_template=COMPONENT)
        schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
    for path, method, operation in _operations(document):
        needs_key = open_paths is not None and path not in open_paths
        _add_errors(path, method, operation, needs_key)
        _hoist_definitions(operation, schemas)
        if needs_key:
            operation["security"] = [{name: []} for name in SECURITY_SCHEMES]
    if open_paths is not None:
        document["components"]["securitySchemes"] = SECURITY_SCHEMES
    return document


def _whole(value: Any) -> Any:
    """FastAPI writes all bounds as floats: 18446744073709551616 would become 1.8446744073709552e+19."""
    if isinstance(value, dict):
        return {name: _whole(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield path, method, operation


def _statuses(path: str, method: str, operation: dict[str, Any], needs_key: bool) -> Iterator[int]:
    yield from (408, 413, 414, 431, 500)
    if needs_key:
        yield from (401, 429)
    if not path.startswith(OPEN_PREFIX):
        yield 403
    if method == "post":
        yield from (429, 503, 504)
    if "text/event-stream" in operation["responses"].get("200", {}).get("content", {}):
        yield from (429, 503)
    if "requestBody" in operation:
        yield from (400, 404, 415)
    if "{" in path or method == "delete":
        yield 404
    if path.endswith(("/load", "/unload")):
        yield 400
    if path.endswith("/unload") or (path.startswith("/v1/adapters") and method != "get"):
        yield 409


def _add_errors(path: str, method: str, operation: dict[str, Any], needs_key: bool) -> None:
    """Every error answer has the JSON form of its API."""
    responses = operation["responses"]
    responses.pop("422", None)
    schema = _error_schema(path)
    for status in sorted(set(_statuses(path, method, operation, needs_key))):
        response = {"description": ERRORS[status], "content": {"application/json": {"schema": schema}}}
        if status in RETRIABLE:
            response["headers"] = RETRY_AFTER
        responses.setdefault(str(status), response)


def _error_schema(path: str) -> dict[str, Any]:
    openai, anthropic, ollama = (
        {"$ref": COMPONENT.format(model=model.__name__)}
        for model in (OpenAIError, AnthropicError, OllamaError)
    )
    if path.startswith(OLLAMA_PREFIX):
        return ollama
    # A request with the header anthropic-version gets Anthropic's form on every other path.
    return anthropic if path.startswith("/v1/messages") else {"anyOf": [openai, anthropic]}


def _hoist_definitions(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Move the parts of answers and events to the document's schemas, where `COMPONENT` refers to them."""
    content = operation["responses"].get("200", {}).get("content", {})
    schemas |= content.get(NDJSON, {}).get("itemSchema", {}).pop("$defs", {})
    whole = content.get("application/json", {}).get("schema", {})
    schemas |= whole.pop("$defs", {})
    if "properties" in whole:  # a model: it gets its name back
        schemas[whole["title"]] = whole
        content["application/json"] = {"schema": {"$ref": COMPONENT.format(model=whole["title"])}}
    data = content.get("text/event-stream", {}).get("itemSchema", {}).get("properties", {}).get("data", {})
    for option in data.get("anyOf", [data]):
        schemas |= option.get("contentSchema", {}).pop("$defs", {})
