"""/openapi.json is true: schemathesis sends what it allows and what it forbids, and checks the answers by it.

The answers are scripted. What only a loaded model refuses (token ids outside its vocabulary, prompts longer
than its context, grammars that do not compile) is no part of the description.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import httpx
import jsonschema_rs
import pytest
import schemathesis
from described_requests import consistent, fields_of
from fake_backend import (
    CALLS,
    CUT,
    FACTS,
    FAILED,
    HELLO,
    THOUGHT,
    USER,
    Client,
    FakeBackend,
    FakeTokenizer,
    server,
)
from fake_backend import settings as settings_of
from fake_embedder import FakeEmbedder
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from schemathesis import Case, GenerationMode

from outrider.api.app import create_server
from outrider.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    PromptLogprobs,
    PromptProgress,
    TextDelta,
    TokenDetail,
    TokenOrigins,
    Usage,
)
from outrider.engine.engine import EngineStopped
from outrider.engine.sequence import TokenOrigin
from outrider.plan import TokenLogprobs
from patience import PATIENCE_S, in_test_or_soak
from server_process import ServerProcess

WITH_LOGPROBS: tuple[ChatEvent, ...] = (
    TextDelta("ab"),
    Logprobs((TokenLogprobs(0, -0.5, ((0, -0.5), (26, -2.0))), TokenLogprobs(1, float("-inf"), ()))),
    Finished("stop", Usage(7, 3, 2), stop_string="."),
)
OF_PROMPT = PromptLogprobs((TokenLogprobs(0, float("nan"), ()), TokenLogprobs(1, -2.0, ((7, -0.2),))))
WITH_ORIGINS: tuple[ChatEvent, ...] = (
    TokenOrigins((TokenDetail(0, TokenOrigin("head", 1), -0.5), TokenDetail(1, TokenOrigin("bonus")))),
    TextDelta("ab"),
    *WITH_LOGPROBS[1:],
)
SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "0"))
ENDLESS = "/v1/status/stream"  # tests/api/operations/test_status_stream.py
# Their requests are those of /v1/responses and /v1/messages.
SAME_REQUESTS = ("/v1/responses/input_tokens", "/v1/messages/count_tokens")
SAME_AS_RERANK = ("/rerank", "/v2/rerank")
SMALL = [f"/api/{name}" for name in ("show", "pull", "delete", "embed", "embeddings")]  # of few fields
CHAT = "/v1/chat/completions"
SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def closed(document: dict[str, Any], model: str = "tiny") -> dict[str, Any]:
    """The document as it is tested: no answer has a field that is not described, and `model` is served."""
    document = copy.deepcopy(document)
    for part in _parts(document):
        properties = part.get("properties", {})
        if part.get("type") == "object" and properties and "additionalProperties" not in part:
            part["additionalProperties"] = False
        if part.get("additionalProperties") is True and "model" in properties:
            properties["model"] = {"enum": [model] if "model" in part.get("required", ()) else [model, None]}
    return document


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(part)


def scripted(request: Any) -> tuple[ChatEvent, ...]:
    """One of the answers, by the request: a bare prompt calls no tools."""
    is_bare = isinstance(request, tuple)
    params = request[1] if is_bare else request.params
    if params.token_origins:
        return WITH_ORIGINS
    if params.prompt_logprobs is not None:
        return OF_PROMPT, *WITH_LOGPROBS
    if params.logprobs is not None:
        return WITH_LOGPROBS
    scripts = (HELLO, CUT) if is_bare else (HELLO, THOUGHT, CALLS, CUT)
    return scripts[(params.max_tokens or 0) % len(scripts)]


def new_schema() -> Any:
    changes = {"max_queue": 1_000_000, "allowed_hosts": ("testserver",)}
    app = server(FakeBackend(answer=scripted), FakeEmbedder(), **changes).app
    schema = schemathesis.openapi.from_dict(closed(app.openapi()))
    schema.app = app
    return with_expected(schema)


def with_expected(schema: Any, *further: str) -> Any:
    """Statuses of schemathesis's own lists, and 413: fields within their bounds can be too large together."""
    checks = schema.config.checks
    for check, more in (("positive_data_acceptance", further), ("negative_data_rejection", ())):
        config = getattr(checks, check)
        config.expected_statuses = [*config.expected_statuses, "413", *more]
    return schema


@pytest.fixture(scope="module")
def schema() -> Any:
    return new_schema()


SEEN: Counter[tuple[str, int]] = Counter()  # (route, status) of answers to requests that are described


def check(case: Case) -> None:
    """Raises unless the answer is as described."""
    is_described = case.meta.generation.mode.is_positive
    if is_described:
        case.body = consistent(case.body, fields_of(case))
    status = case.call_and_validate().status_code
    if is_described:
        SEEN[case.operation.label, status] += 1


# -- all requests that the description allows, and many that it forbids ----------------------------------


def check_operations(schema: Any, max_examples: int, seed_: int = 0) -> None:
    """Random requests to every route: `max_examples` as described, and as many bodies that are not.

    To routes of few fields, five.
    """
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:
        num_examples = 5 if operation.path in SMALL else max_examples
        modes = list(GenerationMode) if len(operation.body) else [GenerationMode.POSITIVE]
        for mode in modes:
            run = given(operation.as_strategy(generation_mode=mode))(check)
            with without_constants():
                seed(seed_)(settings(SETTINGS, max_examples=num_examples)(run))()


def without_constants() -> AbstractContextManager[Any]:
    """Hypothesis draws no strings of the project's own files, also under `make soak`.

    They depend on the modules that are loaded, and name what the server knows and the description leaves
    out: fields that are refused, other spellings of roles.
    """
    return patch.object(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None)


@pytest.mark.soak
def test_answers_are_as_described(schema: Any) -> None:
    SEEN.clear()
    operations = schema.exclude(path=[*SAME_REQUESTS, *SAME_AS_RERANK, ENDLESS])
    check_operations(operations, max_examples=in_test_or_soak(10, 20))
    # A refusal has a described form too: the requests must have been served.
    served = {route for route, status in SEEN if status == 200}
    assert {f"POST {path}" for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages")} <= served
    assert {"GET /health", "GET /v1/models", "GET /v1/status", "GET /metrics"} <= served
    small = ("/v1/embeddings", "/v1/rerank", "/tokenize", "/detokenize")
    assert {f"POST {path}" for path in small} <= served
    assert {f"POST /api/{name}" for name in ("chat", "generate", "show", "pull", "embed")} <= served
    assert {"GET /api/tags", "GET /api/ps", "GET /api/version"} <= served


if SECONDS:  # collecting it takes seconds: schemathesis makes some five thousand requests then

    @pytest.mark.soak
    @new_schema().exclude(path=ENDLESS).parametrize()
    @settings(SETTINGS, max_examples=100)
    def test_requests_at_the_bounds_of_every_field_are_answered_as_described(case: Case) -> None:
        check(case)


@pytest.mark.soak
@pytest.mark.skipif(SECONDS <= 0, reason="runs under `make soak` only")
def test_a_real_server_answers_as_described(live: ServerProcess) -> None:
    """A model refuses more than the description says: ids outside its vocabulary, for instance."""
    schema = schemathesis.openapi.from_dict(closed(live.get("/openapi.json"), model=live.model))
    schema.config.update(base_url=live.url, request_timeout=PATIENCE_S)
    with_expected(schema, "400")
    end_s, num_rounds = time.monotonic() + SECONDS, 0
    while time.monotonic() < end_s:
        check_operations(schema.exclude(path=ENDLESS), 20, seed_=num_rounds)
        num_rounds += 1
    live.wait_until_idle()
    print(f"{num_rounds} rounds; answers to described requests: {dict(SEEN)}")


# -- answers that need a state, a key or a fault ---------------------------------------------------------

STORED = "/v1/responses/{response_id}"
HI = {"messages": USER}


def assert_described(schema: Any, method: str, path: str, response: httpx.Response) -> None:
    """The description has this status, with this content type and body."""
    operation = schema[path][method]
    assert str(response.status_code) in operation.definition.raw["responses"]
    operation.validate_response(response)


def test_stored_responses_are_as_described(schema: Any) -> None:
    of = server(FakeBackend())
    client = Client(of)
    stored = client.post("/v1/responses", {"input": "Hi"}).json()["id"]
    for method, path in (("GET", STORED), ("GET", f"{STORED}/input_items"), ("DELETE", STORED)):
        response = client.request(method, path.format(response_id=stored))
        assert response.status_code == 200
        assert_described(schema, method, path, response)


def test_clearing_the_cache_and_the_status_are_as_described(schema: Any) -> None:
    class Prefixes:
        def prefix_status(self) -> Any:
            return self

        def gauges(self) -> dict[str, int]:
            return {"bytes": 1}

        def counts(self) -> dict[str, int]:
            return {"evictions": 2}

        def clear_prefix_cache(self) -> int:
            return 5

    of = create_server(FakeBackend(), FACTS, FakeTokenizer(), settings_of(), prefix_cache=Prefixes())
    for method, path in (("DELETE", "/v1/cache"), ("GET", "/v1/status"), ("GET", "/metrics")):
        response = Client(of).request(method, path)
        assert response.status_code == 200
        assert_described(schema, method, path, response)


@pytest.mark.parametrize(
    ("backend", "status"),
    [
        (FakeBackend(FAILED), 500),
        (FakeBackend(failure=RuntimeError("boom")), 500),
        (FakeBackend(failure=EngineStopped("closed")), 503),
        (FakeBackend((TextDelta("a"), Finished("cancelled", Usage()))), 503),
    ],
)
def test_faults_are_as_described(schema: Any, backend: FakeBackend, status: int) -> None:
    of = server(backend)
    ollama = HI | {"model": "tiny", "stream": False}
    for path, body in ((CHAT, HI), ("/v1/messages", HI | {"max_tokens": 5}), ("/api/chat", ollama)):
        response = Client(of).post(path, body)
        assert response.status_code == status
        assert_described(schema, "POST", path, response)


def test_refusals_are_as_described(schema: Any) -> None:
    full = server(FakeBackend(), max_body_bytes=100, max_rows=1, max_queue=0)
    reservation = full.context.live.admission.open()
    for body, status in ((HI, 429), (HI | {"user": "x" * 100}, 413)):
        response = Client(full).post(CHAT, body)
        reservation.release()
        assert response.status_code == status
        assert_described(schema, "POST", CHAT, response)
    full.context.live.drain()
    for method, path in (("GET", "/health"), ("POST", CHAT)):
        response = Client(full).request(method, path, json=HI if method == "POST" else None)
        assert response.status_code == 503
        assert_described(schema, method, path, response)


def test_counts_are_as_described(schema: Any) -> None:
    for path, body in zip(SAME_REQUESTS, ({"input": "Hi"}, HI), strict=True):
        response = Client(server(FakeBackend())).post(path, body)
        assert response.status_code == 200
        assert_described(schema, "POST", path, response)


@pytest.mark.parametrize("events", [FAILED, HELLO, CALLS, THOUGHT, CUT, WITH_LOGPROBS])
def test_streams_are_as_described(schema: Any, events: tuple[ChatEvent, ...]) -> None:
    of = server(FakeBackend(events))
    of_text = {"prompt": "a", "logprobs": 1}
    requests = {CHAT: HI, "/v1/messages": HI | {"max_tokens": 5}, "/v1/responses": {"input": "a"}}
    for path, body in (
        requests | ({} if events in (CALLS, THOUGHT) else {"/v1/completions": of_text})
    ).items():
        response = Client(of).post(path, body | {"stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert_described(schema, "POST", path, response)


@pytest.mark.parametrize("events", [FAILED, HELLO, CALLS, THOUGHT, CUT, WITH_LOGPROBS])
def test_lines_are_as_described(schema: Any, events: tuple[ChatEvent, ...]) -> None:
    """schemathesis reads no lines of JSON."""
    of = server(FakeBackend(events))
    bodies = {"/api/chat": HI, "/api/generate": {"prompt": "a"}, "/api/pull": {}}
    for path, body in bodies.items():
        response = Client(of).post(path, body | {"model": "tiny", "logprobs": events is WITH_LOGPROBS})
        assert_described(schema, "POST", path, response)
        content = schema.raw_schema["paths"][path]["post"]["responses"]["200"]["content"]
        components = {"components": schema.raw_schema["components"]}
        line_schema = content["application/x-ndjson"]["itemSchema"] | components
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert lines
        for line in lines:
            jsonschema_rs.validate(line_schema, line)


def test_streamed_origins_are_as_described(schema: Any) -> None:
    body = HI | {"stream": True, "return_token_origins": True, "logprobs": True}
    response = Client(server(FakeBackend(WITH_ORIGINS))).post(CHAT, body)
    assert b"token_origins" in response.content
    assert_described(schema, "POST", CHAT, response)


def test_streamed_progress_is_as_described(schema: Any) -> None:
    events = (PromptProgress(64, 32, 200, 0.25), *HELLO)
    body = HI | {"stream": True, "return_progress": True}
    response = Client(server(FakeBackend(events))).post(CHAT, body)
    assert b"prompt_progress" in response.content
    assert_described(schema, "POST", CHAT, response)


def test_routes_that_need_a_key_say_so_and_the_others_do_not() -> None:
    of = server(FakeBackend(), api_key="k")
    document = of.app.openapi()
    schema = schemathesis.openapi.from_dict(closed(document))
    assert set(document["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            response = Client(of).request(method.upper(), path)
            assert (response.status_code == 401) is ("security" in operation)
            assert_described(schema, method.upper(), path, response)
    assert "security" not in document["paths"]["/health"]["get"]
    assert "securitySchemes" not in server(FakeBackend()).app.openapi()["components"]


def test_a_405_names_all_methods_of_the_path() -> None:
    client = Client(server(FakeBackend()))
    assert client.request("PUT", "/v1/responses/resp_1").headers["allow"] == "DELETE, GET"
    assert client.request("PUT", "/v1/responses/input_tokens").headers["allow"] == "POST"
    assert client.request("POST", "/v1/models/a/b").headers["allow"] == "GET"


@pytest.mark.parametrize("body", [{"seed": 2.0}, {"max_tokens": 5.0}, {"stop_token_ids": [1.0]}])
def test_whole_numbers_may_have_a_point(body: dict[str, Any]) -> None:
    assert Client(server(FakeBackend())).post(CHAT, HI | body).status_code == 200
    assert (
        Client(server(FakeBackend())).post("/v1/completions", {"prompt": [1.0, 2]} | body).status_code == 200
    )
    assert Client(server(FakeBackend())).post(CHAT, HI | {"seed": 2.5}).status_code == 400


def test_the_largest_seed_serves_several_choices() -> None:
    backend = FakeBackend()
    assert Client(server(backend)).post(CHAT, HI | {"seed": 2**64 - 1, "n": 2}).status_code == 200
    assert [request.params.seed for request in backend.requests] == [2**64 - 1, 0]
