"""Keys, sizes, queues, ids, and bodies that are not what they should be: answered in the API's own shape."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import astuple, fields
from typing import Any

import httpx
import pytest
from fake_backend import HELLO, USER, Client, FakeAnswers, FakeBackend, FakeStream, Gate, server, settings
from hypothesis import given
from hypothesis import strategies as st

from outrider.api import limits
from outrider.api.admission import Admission, Reservation, current_reservation
from outrider.api.answers import LiveRequests
from outrider.api.app import Server
from outrider.api.body import parse_json
from outrider.api.errors import ApiError
from outrider.api.load import Load, LoadLimit
from outrider.api.middleware import RequestIdFilter
from outrider.api.operations.metrics import Metrics
from outrider.config import InvalidConfig
from outrider.engine.engine import EngineStopped
from outrider.request import InvalidRequest

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    MESSAGES: {"messages": USER, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": USER},
}
JSON = {"content-type": "application/json"}


def message_of(response: httpx.Response) -> str:
    """The message, once the shape is seen to be the route's own."""
    body = response.json()
    if response.request.url.path.startswith(MESSAGES):
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    return str(body["error"]["message"])


# -- bodies ----------------------------------------------------------------------------------------------

BAD_BODIES: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 400, "Field required"),
    "malformed": (b'{"messages": [', 400, "not valid JSON"),
    "trailing comma": (b'{"a": 1,}', 400, "not valid JSON"),
    "invalid UTF-8": (b'{"a": "\xff\xfe"}', 400, "not valid UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), 400, "not valid UTF-8"),
    "NaN": (b'{"temperature": NaN}', 400, "NaN"),
    "infinity": (b'{"temperature": Infinity}', 400, "Infinity"),
    "number that is read as infinity": (b'{"tools": [{"minimum": -1e999}]}', 400, "too large"),
    "lone surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "surrogate"),
    "lone surrogate, deep": (b'{"x": {"\\uDFFF": 1}}', 400, "surrogate"),
    "nested too deeply": (b"[" * 100_000, 400, "nested"),
    "endless number": (b'{"seed": 1' + b"0" * 5000 + b"}", 400, "digits"),
    "too many digits": (b'{"seed": -1' + b"0" * 64 + b"}", 400, "digits"),
    "a list": (b"[1, 2]", 400, "dictionary"),
    "a string": (b'"hello"', 400, "dictionary"),
    "null": (b"null", 400, ""),
    "gzip": (gzip.compress(b"{}"), 400, "not valid UTF-8"),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("case", BAD_BODIES)
def test_bad_body_is_a_4xx_with_words(path: str, case: str) -> None:
    content, status, words = BAD_BODIES[case]
    client = Client(server(FakeBackend()))
    response = client.post(path, content=content, headers=JSON)
    assert response.status_code == status
    assert words in message_of(response)
    assert client.post(path, BODIES[path]).status_code == 200  # and it serves on


json_values = st.recursive(
    st.text('\\"{[,a', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('\\"{[,a', max_size=8), inner, max_size=3)
    ),
)


@given(json_values, st.integers(2, 9))
def test_texts_do_not_count_wherever_a_body_is_cut(value: object, slice_bytes: int) -> None:
    def without_texts(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f": {without_texts(member)}" for member in value.values()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(without_texts, value)) + "]"
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "SLICE_BYTES", slice_bytes)
        found = b"".join(limits._without_texts(json.dumps(value).encode()))
    assert found.decode() == without_texts(value)


@pytest.mark.parametrize("num_before", range(12))
def test_half_a_surrogate_pair_is_found_wherever_a_body_is_cut(
    num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLICE_BYTES", 7)
    with pytest.raises(ApiError, match="surrogate"):
        parse_json(b'["' + b"a" * num_before + b'\\uDBFF"]')


def test_paired_surrogates_are_a_character() -> None:
    backend = FakeBackend()
    content = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert Client(server(backend)).post(CHAT, content=content, headers=JSON).status_code == 200
    assert backend.requests[0].messages[0].text == "😀"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    response = Client(server(FakeBackend())).request(
        "POST", CHAT, content=json.dumps(BODIES[CHAT]).encode(), headers=headers
    )
    assert response.status_code == 415
    assert "application/json" in message_of(response)


@pytest.mark.parametrize("path", BODIES)
def test_huge_body_is_a_413(path: str) -> None:
    client = Client(server(FakeBackend(), max_body_bytes=1000))
    response = client.post(path, {"messages": "x" * 2000})
    assert response.status_code == 413
    assert "1,000 bytes" in message_of(response)


def test_huge_body_of_unknown_size_is_a_413() -> None:
    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 100

    response = Client(server(FakeBackend(), max_body_bytes=1000)).request(
        "POST", CHAT, content=chunks(), headers=JSON
    )
    assert response.status_code == 413


def test_refusals_of_the_service_are_400s_with_its_words() -> None:
    client = Client(server(FakeBackend(failure=InvalidRequest("the prompt has 900 tokens: shorten it"))))
    for path in list(BODIES)[:4]:
        response = client.post(path, BODIES[path])
        assert response.status_code == 400
        assert message_of(response) == "the prompt has 900 tokens: shorten it"


def test_stopped_engine_is_a_503() -> None:
    response = Client(server(FakeBackend(failure=EngineStopped("stopped")))).post(CHAT, BODIES[CHAT])
    assert response.status_code == 503
    assert response.headers["retry-after"]


def test_fault_of_ours_is_a_500_without_details() -> None:
    client = Client(server(FakeBackend(failure=KeyError("secret"))))
    response = client.post(CHAT, BODIES[CHAT])
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"]


def test_unknown_route_and_method_have_the_shape_too() -> None:
    client = Client(server(FakeBackend()))
    assert client.get("/v1/nothing").status_code == 404
    message_of(client.get("/v1/nothing"))
    assert client.get(CHAT).status_code == 405
    message_of(client.get(MESSAGES))


def test_embeddings_are_declined_clearly() -> None:
    response = Client(server(FakeBackend())).post("/v1/embeddings", {"input": "x", "model": "tiny"})
    assert response.status_code == 404
    assert "embedding" in message_of(response)


# -- keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic secret"}, 401),
        ({"authorization": "secret"}, 401),
        ({"x-api-key": "Secret"}, 401),
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer secret"}, 200),
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer other", "x-api-key": "secret"}, 200),
    ],
)
def test_key(headers: dict[str, str], status: int) -> None:
    client = Client(server(FakeBackend(), api_key="secret"), **headers)
    for path in (CHAT, MESSAGES):
        response = client.post(path, BODIES[path])
        assert response.status_code == status
        if status == 401:
            assert "API key" in message_of(response)
            assert response.headers["www-authenticate"] == "Bearer"
    assert client.get("/v1/models").status_code == status
    assert client.get("/metrics").status_code == status
    assert client.get("/health").status_code == 200


def test_key_is_asked_for_before_the_body_is_read() -> None:
    client = Client(server(FakeBackend(), api_key="secret", max_body_bytes=10))
    assert client.post(CHAT, content=b"x" * 100, headers=JSON).status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(InvalidConfig, match="no API key"):
        settings(host=host)
    settings(host=host, api_key="k")
    settings(host=host, allow_public_without_key=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    settings(host=host)


@pytest.mark.parametrize(
    "change",
    [
        {"port": 70000},
        {"port": -1},
        {"max_queue": -1},
        {"max_rows": 0},
        {"max_tokens": 0},
        {"api_key": ""},
        {"api_key": "a b"},
        {"api_key": "ключ"},
        {"keep_alive_s": 0},
        {"served_model_names": ()},
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        settings(**change)


# -- ids and origins -------------------------------------------------------------------------------------


def test_request_id_is_the_clients_if_it_is_sane() -> None:
    client = Client(server(FakeBackend()))
    given = client.get("/health", headers={"x-request-id": "abc-1"}).headers
    assert given["x-request-id"] == given["request-id"] == "abc-1"
    for bad in ("a b", "x" * 200, "{}"):
        assert client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req_")


def test_request_id_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="outrider")
    caplog.handler.addFilter(RequestIdFilter())
    client = Client(server(FakeBackend()))
    client.post(CHAT, BODIES[CHAT] | {"zap": 1}, headers={"x-request-id": "abc-1"})
    records = [record for record in caplog.records if record.name.startswith("outrider")]
    assert {record.request_id for record in records} == {"abc-1"}  # type: ignore[attr-defined]
    assert any("POST /v1/chat/completions 200" in record.message for record in records)


def test_browsers_may_call_from_allowed_origins_only() -> None:
    ask = {"origin": "http://app.test", "access-control-request-method": "POST"}
    allowed = Client(server(FakeBackend(), cors_origins=("http://app.test",), api_key="k"))
    assert allowed.request("OPTIONS", CHAT, headers=ask).status_code == 200
    assert allowed.get("/health", headers=ask).headers["access-control-allow-origin"] == "http://app.test"
    other = allowed.get("/health", headers=ask | {"origin": "http://evil.test"})
    assert "access-control-allow-origin" not in other.headers
    assert (
        "access-control-allow-origin" not in Client(server(FakeBackend())).get("/health", headers=ask).headers
    )


# -- full servers and shutdowns --------------------------------------------------------------------------


def test_full_server_says_429_and_when_to_come_back() -> None:
    gate = Gate(num_events=0)
    made = server(FakeBackend(HELLO, gate=gate), max_rows=1, max_queue=1)
    responses: list[httpx.Response] = []

    async def run() -> None:
        transport = httpx.ASGITransport(made.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:

            async def post() -> None:
                responses.append(await http.post(CHAT, json=BODIES[CHAT]))
                if len(responses) == 2:  # both are refusals: the answers are held
                    gate.open()

            await asyncio.gather(*(post() for _ in range(4)))

    asyncio.run(run())
    assert sorted(response.status_code for response in responses) == [200, 200, 429, 429]
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.headers["retry-after"] == "2"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert made.context.live.num_live == 0
    assert Client(made).post(CHAT, BODIES[CHAT]).status_code == 200


def test_more_choices_than_the_server_holds_are_a_400() -> None:
    response = Client(server(FakeBackend(), max_rows=1, max_queue=1)).post(CHAT, BODIES[CHAT] | {"n": 3})
    assert response.status_code == 400


def test_prompt_that_fails_to_start_leaves_nothing_behind() -> None:
    class Picky(FakeBackend):
        def complete(self, *request: Any) -> Any:
            if len(self.streams) == 2:
                raise InvalidRequest("no more")
            return super().complete(*request)

    backend = Picky()
    made = server(backend)
    assert Client(made).post("/v1/completions", {"prompt": ["a", "b", "c"]}).status_code == 400
    assert [stream.aborted for stream in backend.streams] == [True, True]
    assert made.context.live.num_live == 0


def test_draining_server_is_not_ready_and_takes_nobody() -> None:
    made = server(FakeBackend())
    made.context.live.drain()
    client = Client(made)
    assert client.get("/health/live").status_code == 200
    assert client.get("/health/ready").status_code == 503
    assert client.get("/health").status_code == 503
    for path, kind in ((CHAT, "server_error"), (MESSAGES, "overloaded_error")):
        response = client.post(path, BODIES[path])
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert response.json()["error"]["type"] == kind


def test_places_are_freed_once() -> None:
    live = LiveRequests(Admission(LoadLimit(num_requests=2, num_tokens=100)), Metrics(), settings())

    async def prepare() -> FakeAnswers:
        return FakeAnswers([lambda: FakeStream("req", HELLO)] * 2)

    async def run() -> None:
        current_reservation.set(live.admission.open())
        receive: Any = asyncio.Event().wait
        model = server(FakeBackend()).context.find_model("tiny")
        answers = await live.start("chat", model, 2, lambda served: [prepare], receive)
        with pytest.raises(ApiError) as caught:
            live.admission.open()
        assert caught.value.status_code == 429
        answers.close()
        answers.close()
        assert live.admission.held == Load()

    asyncio.run(run())


def fill(made: Server, load: Load) -> Reservation:
    """A reservation that leaves room for `load` only."""
    limit = Load(*astuple(made.context.live.admission.limit))
    held = made.context.live.admission.open("other")
    held.add(*(getattr(limit - load - held.held, f.name) for f in fields(Load)))
    return held


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("room", "words"),
    [
        (Load(0, 1 << 20, 1000), "requests that run or wait"),
        (Load(5, 10, 1000), "bytes of request bodies"),
        (Load(5, 1 << 20, 5), "prompt tokens that run or wait"),
    ],
    ids=["requests", "bytes", "tokens"],
)
def test_each_limit_of_admission_is_a_429_that_names_it(path: str, room: Load, words: str) -> None:
    made = server(FakeBackend())
    held = fill(made, room)
    response = Client(made).post(path, BODIES[path])
    if path.endswith("count_tokens") and room.num_tokens < 7:
        assert response.status_code == 200  # nothing is queued
        return
    assert response.status_code == 429
    assert words in message_of(response)
    assert response.headers["retry-after"] == "2"
    assert made.context.live.admission.held == held.held  # the refused request holds nothing
    held.release()
    assert Client(made).post(path, BODIES[path]).status_code == 200
    assert made.context.live.admission.held == Load()


def test_answers_are_counted_before_any_prompt_is_prepared() -> None:
    backend = FakeBackend()
    made = server(backend)
    response = Client(made).post("/v1/completions", {"prompt": ["a"] * 200, "n": 100})
    assert response.status_code == 400
    assert "20,000 requests" in message_of(response)
    assert backend.num_prepared == 0


def test_n_answers_are_prepared_once() -> None:
    backend = FakeBackend()
    client = Client(server(backend))
    assert len(client.post(CHAT, BODIES[CHAT] | {"n": 5}).json()["choices"]) == 5
    assert backend.num_prepared == 1
    assert len(client.post("/v1/completions", {"prompt": ["a", "b"], "n": 3}).json()["choices"]) == 6
    assert backend.num_prepared == 3
