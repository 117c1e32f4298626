"""The HAProxy configuration in deploy/ does what the docs say. Small HTTP servers stand for Outrider."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from haproxy_process import PROGRAM, Proxy, proxying
from patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="HAProxy is not installed (apt-get install haproxy)")


class Replica(ThreadingHTTPServer):
    """Answers with its name. `/stream` sends one event, and the other one when `may_end` is set."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name = name
        self.is_draining = False
        self.may_end = threading.Event()
        self.num_requests = 0
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        """HAProxy resets the connections of its health checks."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which holds each answer back for 40 ms
    server: Replica

    def do_GET(self) -> None:
        self._answer(503 if self.server.is_draining else 200)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.num_requests += 1
        if self.path == "/stream":
            self._stream()
        else:
            self._answer(503 if self.server.is_draining else 200, len(body))

    def _answer(self, status: int, num_bytes: int = 0) -> None:
        key = self.headers.get("Authorization")
        data = json.dumps({"server": self.server.name, "key": key, "bytes": num_bytes}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in (b"data: one\n\n", b"data: two\n\n", b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            assert event != b"data: one\n\n" or self.server.may_end.wait(PATIENCE_S)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def replicas() -> Iterator[dict[str, Replica]]:
    found = {name: Replica(name) for name in ("a", "b")}
    yield found
    for replica in found.values():
        replica.shutdown()
        replica.server_close()


@pytest.fixture(scope="module")
def proxy(replicas: dict[str, Replica]) -> Iterator[Proxy]:
    ports = {name: replica.server_port for name, replica in replicas.items()}
    with proxying(ports, **{"inter 2s": "inter 50ms"}) as found:
        yield found


CLIENT = httpx.Client(timeout=PATIENCE_S)  # one for all tests: each takes a while to make


def server_of(proxy: Proxy, body: Any, path: str = "/v1/chat/completions", **headers: str) -> str:
    response = CLIENT.post(proxy.url + path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    name: str = response.json()["server"]
    return name


# -- conversations ---------------------------------------------------------------------------------------


def said(role: str, text: str, as_parts: bool = False) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}


def chat(number: int, turn: int) -> dict[str, Any]:
    """A turn of a conversation: the system prompt is that of all conversations."""
    messages = [said("system", "You are helpful."), said("user", f"question {number}", number % 2 == 0)]
    for i in range(turn):
        messages += [said("assistant", f"answer {i}"), said("user", f"and {i}?")]
    return {"model": "m", "messages": messages, "stream": False}


def without_system(number: int, turn: int) -> dict[str, Any]:
    body = chat(number, turn)
    return body | {"messages": body["messages"][1:], "system": "You are helpful."}


def with_field(name: str) -> Any:
    """Turns that have nothing in common but the field."""

    def body(number: int, turn: int) -> dict[str, Any]:
        field = {"metadata": {"user_id": f"u{number}"}} if name == "metadata" else {name: f"u{number}"}
        return {"messages": [said("user", f"something else {number} {turn}")]} | field

    return body


def responses(number: int, turn: int) -> dict[str, Any]:
    return {"store": False, "input": chat(number, turn)["messages"]}


KINDS = {
    "chat": ("/v1/chat/completions", chat),
    "anthropic": ("/v1/messages", without_system),
    "responses": ("/v1/responses", responses),
    "ollama": ("/api/chat", chat),
    "prompt_cache_key": (
        "/v1/responses",
        lambda n, t: with_field("prompt_cache_key")(n, t) | {"store": False},
    ),
    "user_id": ("/v1/messages", with_field("metadata")),
    "user": ("/v1/chat/completions", with_field("user")),
    "completions": ("/v1/completions", lambda n, t: {"prompt": f"{n} " * 400 + "more " * t}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_turns_of_a_conversation_go_to_one_server_and_conversations_to_both(proxy: Proxy, kind: str) -> None:
    path, body = KINDS[kind]
    chosen = []
    for number in range(12):
        (server,) = {server_of(proxy, body(number, turn), path) for turn in (0, 2)}
        chosen.append(server)
    assert set(chosen) == {"a", "b"}


def test_the_header_comes_before_the_body(proxy: Proxy) -> None:
    chosen = set()
    for number in range(12):
        headers = {"X-Conversation-Id": f"c{number}"}
        (server,) = {server_of(proxy, chat(number + turn, turn), **headers) for turn in range(2)}
        chosen.add(server)
    assert chosen == {"a", "b"}


def test_stored_responses_of_a_key_stay_on_one_server(proxy: Proxy) -> None:
    chosen = set()
    for number in range(12):
        headers = {"Authorization": f"Bearer k{number}"}
        bodies = [{"input": f"question {turn}", "prompt_cache_key": f"{turn}"} for turn in range(2)]
        servers = {server_of(proxy, body, "/v1/responses", **headers) for body in bodies}
        got = CLIENT.get(f"{proxy.url}/v1/responses/resp_1", headers=headers)
        (server,) = servers | {got.json()["server"]}
        chosen.add(server)
    assert chosen == {"a", "b"}


PROGRAMS = (
    *("aider", "claude_code", "claude_code_deferred", "codex", "langchain_anthropic", "langchain_openai"),
    *("llm", "ollama_javascript", "ollama_python", "vercel_anthropic", "vercel_compatible", "vercel_openai"),
)


def test_all_requests_of_a_session_of_a_real_program_go_to_one_server(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "agents"))
    recorded: Any = importlib.import_module("recorded")
    for name in PROGRAMS:
        requests = recorded.load(name).requests
        servers = {
            server_of(proxy, one["body"], one["path"], **one["headers"])
            for one in requests
            if one["path"] not in ("/v1/messages/count_tokens",)
        }
        assert len(servers) == 1, name


def test_a_body_larger_than_the_buffer_passes_and_stays(proxy: Proxy) -> None:
    body = chat(3, 1)
    name = server_of(proxy, body)
    large = body | {"messages": [*body["messages"], said("assistant", "x" * 3_000_000)]}
    response = CLIENT.post(f"{proxy.url}/v1/chat/completions", json=large).json()
    assert response["server"] == name
    assert response["bytes"] > 3_000_000


# -- servers that leave ----------------------------------------------------------------------------------


def number_on(proxy: Proxy, server: str, **headers: str) -> int:
    """A conversation of this server."""
    return next(number for number in range(100) if server_of(proxy, chat(number, 0), **headers) == server)


def test_a_server_that_drains_gets_nothing_and_its_conversations_return_later(
    proxy: Proxy, replicas: dict[str, Replica]
) -> None:
    number = number_on(proxy, "a")
    replicas["a"].is_draining = True
    try:  # at once, before a health check has failed
        assert server_of(proxy, chat(number, 0)) == "b"
        wait_until(lambda: ",DOWN," in state_of(proxy, "a"))
        asked = replicas["a"].num_requests
        assert server_of(proxy, chat(number, 1)) == "b"
        assert replicas["a"].num_requests == asked
    finally:
        replicas["a"].is_draining = False
    wait_until(lambda: ",UP," in state_of(proxy, "a"))
    assert server_of(proxy, chat(number, 2)) == "a"


def test_an_operator_drains_a_server(proxy: Proxy) -> None:
    number = number_on(proxy, "b")
    proxy.tell("set server outrider/b state drain")
    assert server_of(proxy, chat(number, 1)) == "a"
    proxy.tell("set server outrider/b state ready")
    wait_until(lambda: ",UP," in state_of(proxy, "b"))
    assert server_of(proxy, chat(number, 2)) == "b"


def state_of(proxy: Proxy, server: str) -> str:
    return next(
        line for line in proxy.tell("show stat").splitlines() if line.startswith(f"outrider,{server},")
    )


def test_a_server_that_is_gone_is_left_out(proxy: Proxy, replicas: dict[str, Replica]) -> None:
    lost = Replica("c")
    ports = {"b": replicas["b"].server_port, "c": lost.server_port}
    with proxying(ports) as second:
        new_connection = {"Connection": "close"}  # the old one is served by a thread that does not end
        number = number_on(second, "c", **new_connection)
        lost.shutdown()
        lost.server_close()
        assert server_of(second, chat(number, 1), **new_connection) == "b"


# -- what passes -----------------------------------------------------------------------------------------


def test_events_of_a_stream_pass_at_once(proxy: Proxy, replicas: dict[str, Replica]) -> None:
    with CLIENT.stream("POST", f"{proxy.url}/stream", json=chat(1, 0)) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines) == "data: one"
        for replica in replicas.values():
            replica.may_end.set()
        assert next(lines) == "data: two"


def test_keys_pass_and_the_routes_of_operators_do_not(proxy: Proxy) -> None:
    headers = {"Authorization": "Bearer secret"}
    response = CLIENT.post(f"{proxy.url}/v1/chat/completions", json=chat(1, 0), headers=headers)
    assert response.json()["key"] == "Bearer secret"
    for path in ("/metrics", "/v1/status", "/v1/status/stream", "/v1/cache"):
        assert CLIENT.get(proxy.url + path, headers=headers).status_code == 404
