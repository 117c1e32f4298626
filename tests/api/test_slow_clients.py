"""Clients that send slowly, never read, or wait too long: a real server process closes them and serves on."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from patience import PATIENCE_S, wait_until
from server_process import ServerProcess, serving

ROWS = 4
# The limits are short, but long enough for a client on a busy machine to send a small request.
FLAGS = ("--max-rows", str(ROWS), "--max-queue", "0", "--max-connections", "16", "--max-body", "1MiB")
TIMES = ("--header-timeout", "3", "--body-timeout", "3", "--write-timeout", "3", "--max-live-bytes", "1MiB")
ENDLESS = {"max_tokens": 8000, "ignore_eos": True}
USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, **ENDLESS},
    "/v1/completions": {"prompt": "Hi", **ENDLESS},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 8000, "ignore_eos": True},
    "/v1/messages": {"messages": USER, **ENDLESS},
}
CHAT = "/v1/chat/completions"


class LoggedServer:
    """A server process and the lines of its log."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.server.process.stdout is not None
        self.lines.extend(iter(self.server.process.stdout.readline, ""))

    def line_with(self, text: str) -> str:
        wait_until(lambda: any(text in line for line in self.lines))
        return next(line for line in self.lines if text in line)

    def refusals(self, reason: str) -> float:
        return self.server.metric(f'outrider_refusals_total{{reason="{reason}"}}')

    def connect(self, data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
        address = httpx.URL(self.server.url)
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(PATIENCE_S)
        connection.connect((address.host, address.port))
        connection.sendall(data)
        return connection


@pytest.fixture(scope="module")
def logged(tiny_folder: Path) -> Iterator[LoggedServer]:
    with serving(tiny_folder, *FLAGS, *TIMES) as server:
        yield LoggedServer(server)


def read_to_end(connection: socket.socket) -> bytes:
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b""))


def post(path: str, body: bytes, length: int | None = None, headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode() + body


# -- requests that do not arrive -------------------------------------------------------------------------


def test_idle_and_half_sent_requests_are_closed(logged: LoggedServer) -> None:
    idle = logged.connect()
    half_header = logged.connect(b"GET /health HTTP/1.1\r\nhost: 127")
    half_body = logged.connect(post(CHAT, b'{"messages": [', length=1000))
    half_second = logged.connect(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET /hea")
    assert read_to_end(idle) == b""
    answer = read_to_end(half_header)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"--header-timeout" in answer
    answer = read_to_end(half_body)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"--body-timeout" in answer
    answer = read_to_end(half_second)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer
    assert logged.refusals("idle_connection") >= 1
    assert logged.refusals("header_timeout") == 2
    assert logged.refusals("body_timeout") >= 1
    assert "408" in logged.line_with("(body_timeout)")


def test_slow_uploads_hold_no_place(logged: LoggedServer) -> None:
    num_before = logged.refusals("body_timeout")
    halves = [logged.connect(post(CHAT, b'{"messages": [', length=1000)) for _ in range(ROWS)]
    wait_until(  # or it is too late to see all of them
        lambda: (
            logged.server.metric("outrider_connections") > ROWS
            or logged.refusals("body_timeout") > num_before
        )
    )
    assert logged.server.post(CHAT, {"messages": USER, "max_tokens": 1}).status_code == 200
    assert all(read_to_end(half).startswith(b"HTTP/1.1 408 ") for half in halves)


def test_a_new_connection_takes_the_place_of_an_idle_one(logged: LoggedServer) -> None:
    idle = [logged.connect() for _ in range(16)]
    assert logged.server.get("/health") == {"status": "ready"}
    assert read_to_end(idle[0]) == b""
    for connection in idle:
        connection.close()


def test_body_of_a_refused_request_is_not_read(logged: LoggedServer) -> None:
    continues = "expect: 100-continue\r\n"
    with logged.connect(post("/v1/nowhere", b"", length=1_000_000, headers=continues)) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 404 ")  # and not 100: the client keeps its body


def test_bodies_of_all_requests_together_are_limited(logged: LoggedServer) -> None:
    half = b'{"messages": "' + b"x" * 600_000
    both = [logged.connect(post(CHAT, half, length=900_000)) for _ in range(2)]
    (refused,), _, _ = select.select(both, [], [], PATIENCE_S)  # the one whose body came last
    assert refused.recv(100).startswith(b"HTTP/1.1 429 ")
    for connection in both:
        connection.close()
    assert logged.refusals("live_bytes") == 1
    wait_until(lambda: logged.server.post(CHAT, {"messages": USER, "max_tokens": 1}).status_code == 200)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"a: b\r\n" * 200, 431),
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\na: " + b"b" * 15_000 + b"\r\nc: " + b"d" * 15_000, 431),
        (b"GET /health?" + b"a" * 9000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n", 414),
        (b"GET /health\r\n", 400),
    ],
    ids=["many headers", "large headers", "long URL", "no HTTP"],
)
def test_headers_are_limited(logged: LoggedServer, head: bytes, status: int) -> None:
    with logged.connect(head.removesuffix(b"\r\n") + b"\r\n\r\n") as connection:
        answer = connection.recv(65536)
    # h11 answers headers over 16 KiB with a 400 if they arrive in several pieces.
    assert answer.startswith((f"HTTP/1.1 {status} ".encode(), b"HTTP/1.1 400 "))


# -- answers that are not read ---------------------------------------------------------------------------


def test_streams_that_are_never_read_are_cut_off(logged: LoggedServer) -> None:
    wait_until(lambda: not logged.server.get("/v1/status")["live_requests"])
    # Chunks with log-probabilities fill the buffers after some dozens of tokens.
    body = json.dumps(BODIES[CHAT] | {"stream": True, "logprobs": True, "top_logprobs": 20}).encode()
    stalled: list[socket.socket] = []

    def is_full_meanwhile() -> bool:
        """False if the first stream was cut off before the server was asked: then all begins anew."""
        logged.server.wait_until_idle()
        num_before = len(stalled)
        stalled.extend(logged.connect(post(CHAT, body), receive_buffer=4096) for _ in range(ROWS))
        wait_until(
            lambda: (
                logged.server.get("/v1/status")["live_requests"] == ROWS
                or logged.refusals("write_timeout") > num_before
            )
        )
        return logged.server.post(CHAT, {"messages": USER, "max_tokens": 1}).status_code == 429

    wait_until(is_full_meanwhile)
    logged.server.wait_until_idle()
    assert logged.server.post(CHAT, {"messages": USER, "max_tokens": 1}).status_code == 200
    assert logged.refusals("write_timeout") == len(stalled)
    assert f"POST {CHAT} 499" in logged.line_with("(write_timeout)")
    for connection in stalled:
        connection.close()


# -- answers that take too long --------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_answer_that_takes_too_long_is_a_504(logged: LoggedServer, path: str) -> None:
    response = logged.server.post(path, BODIES[path] | {"timeout": 0.1})
    assert response.status_code == 504
    assert response.headers["x-should-retry"] == "false"
    assert "0.1 s" in response.json()["error"]["message"]
    logged.server.wait_until_idle()


def test_stream_that_takes_too_long_ends_with_an_error_of_its_api(logged: LoggedServer) -> None:
    def stream(path: str) -> str:
        return logged.server.post(path, BODIES[path] | {"stream": True, "timeout": 2}).text

    with ThreadPoolExecutor(ROWS) as threads:
        texts = dict(zip(BODIES, threads.map(stream, BODIES), strict=True))
    for path in ("/v1/chat/completions", "/v1/completions"):
        *_, error, done, _ = texts[path].split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
        assert done == "data: [DONE]"
    last = texts["/v1/responses"].strip().split("\n\n")[-1]
    assert last.startswith("event: response.failed\n")
    assert "2 s" in json.loads(last.partition("data: ")[2])["response"]["error"]["message"]
    last = texts["/v1/messages"].strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    assert json.loads(last.partition("data: ")[2])["error"]["type"] == "timeout_error"
    logged.server.wait_until_idle()


@pytest.mark.parametrize("timeout", [0, -1, "1", 1e999])
def test_bad_timeout_is_a_400(logged: LoggedServer, timeout: Any) -> None:
    body = json.dumps(BODIES[CHAT] | {"timeout": timeout}).replace("Infinity", "1e999")
    headers = {"content-type": "application/json"}
    response = httpx.post(logged.server.url + CHAT, content=body, headers=headers, timeout=PATIENCE_S)
    assert response.status_code == 400
    assert any(word in response.json()["error"]["message"] for word in ("timeout", "number is too large"))


# -- the log ---------------------------------------------------------------------------------------------


def test_client_cannot_forge_a_line_of_the_log(logged: LoggedServer) -> None:
    url = f"{logged.server.url}/v1/models/x%0Aforged%0D%1b[31m%E2%80%AE"
    assert httpx.get(url, timeout=PATIENCE_S).status_code == 404
    line = logged.line_with("forged")
    assert r"GET /v1/models/x\nforged\r\x1b[31m\u202e 404" in line
    assert line.rstrip().endswith("(not_found)")
