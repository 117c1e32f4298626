"""`outrider chat --url`: against scripts for what servers may do, and once against a real one."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.chat.conversation import Message, TextPart
from outrider.chat.events import ChatEvent, Finished, ReasoningDelta, TextDelta, Usage
from outrider.cli.chat_backends import ChatFailed
from outrider.cli.chat_server import ServerBackend
from outrider.config import InvalidConfig
from outrider.server_address import ServerAddress
from patience import PATIENCE_S
from scripted_server import Reply, refuses, says, scripted, stream
from server_process import ServerProcess, outrider, serving, write_tiny_model

HI = [Message("system", (TextPart("Be brief."),)), Message("user", (TextPart("Hi"),))]


def ask(url: str, **chosen: Any) -> list[ChatEvent]:
    backend = ServerBackend(ServerAddress.parse(url, "key"), "m", chosen)
    with contextlib.closing(backend):
        return list(backend.answer(HI))


# -- chunks ----------------------------------------------------------------------------------------------


def test_a_stream_becomes_events_with_usage_and_times() -> None:
    details = {"reasoning_tokens": 2, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}
    usage = {"prompt_tokens": 5, "completion_tokens": 6, "completion_tokens_details": details}
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm"}]
    with scripted([stream(*deltas, {"content": "Hé"}, finish="length", usage=usage)]) as server:
        *events, finished = ask(server.url)
    assert events == [ReasoningDelta("Hm"), TextDelta("Hé")]
    assert isinstance(finished, Finished)
    assert finished.reason == "length"
    assert finished.usage == Usage(5, 0, 6, 2, 3, 4)
    assert finished.stats.ttft_s is not None
    assert finished.stats.total_s is not None
    assert 0 < finished.stats.ttft_s <= finished.stats.total_s


def test_the_request_says_what_was_chosen_and_nothing_else() -> None:
    with scripted([says("a"), says("b")]) as server:
        ask(server.url, max_tokens=9, temperature=0.5)
        ask(server.url + "/v1/", seed=3, draft_depth=2)
        plain, chosen = server.bodies
        assert server.headers[0]["Authorization"] == "Bearer key"
    assert plain == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 9,
    }
    assert (chosen["seed"], chosen["draft_depth"]) == (3, 2)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (refuses(400, "the prompt is too long"), "the server answered 400: the prompt is too long"),
        (Reply([b"<html>"], 502, "text/html"), "the server answered 502: Bad Gateway"),
        (Reply([b"<html>"], 200, "text/html"), "answered with text/html, not with a stream of events"),
        (Reply([b'data: {"error": {"message": "it broke"}}\n\n']), "it broke"),
        (Reply([b"data: nonsense\n\n"]), "not a JSON object"),
        (Reply([b'data: {"choices": [1]}\n\n']), "not a chunk of a chat completion"),
        (
            Reply([b'data: {"choices": [{"delta": {"content": [1]}}]}\n\n']),
            "not a chunk of a chat completion",
        ),
        (stream({"content": "Hel"}, finish=None), "hung up in the middle"),
    ],
)
def test_what_goes_wrong_is_said(reply: Reply, message: str) -> None:
    with scripted([reply]) as server, pytest.raises(ChatFailed, match=message):
        ask(server.url)


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(ChatFailed, match=r"cannot reach http://127.0.0.1:9: Connection refused"):
        ask("127.0.0.1:9")


def test_the_first_model_of_the_server_is_found() -> None:
    with scripted([]) as server:
        backend = ServerBackend(ServerAddress.parse(server.url), None, {})
    backend.close()
    assert backend.greeting == f"first at {server.url}."


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/llm/v1", "https://h/llm"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert str(ServerAddress.parse(url)) == shown


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "http://me:pw@h", "http://h?x=1"])
def test_bad_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="--url"):
        ServerAddress.parse(url)


# -- in a terminal ---------------------------------------------------------------------------------------


class Terminal:
    """A chat whose input and output are a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._seen = ""

    def type(self, line: str) -> None:
        os.write(self._master, f"{line}\n".encode())

    def wait_for(self, text: str, seconds: float = PATIENCE_S) -> str:
        """What came up to the text and with it."""
        deadline = time.monotonic() + seconds
        while text not in self._seen:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([self._master], [], [], left_s)[0], self._seen
            assert left_s, f"{text!r} did not come in {seconds} seconds"
            with contextlib.suppress(OSError):
                self._seen += os.read(self._master, 65536).decode()
        before, self._seen = self._seen.split(text, 1)
        return before + text


@contextlib.contextmanager
def terminal(*args: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "chat", *args],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=variables | {"TERM": "xterm"},
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        os.close(master)


def _endless() -> Iterator[bytes]:
    yield b'data: {"choices": [{"delta": {"reasoning_content": "Hmm"}}]}\n\n'
    yield b'data: {"choices": [{"delta": {"content": "**so** it goes"}}]}\n\n'
    for _ in range(30_000):
        yield b'data: {"choices": [{"delta": {"content": " on"}}]}\n\n'
        time.sleep(0.01)


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation() -> None:
    with scripted([Reply(_endless()), says("*yes*")]) as server, terminal("--url", server.url) as chat:
        chat.wait_for("> ")
        chat.type("tell me")
        shown = chat.wait_for("\x1b[1mso\x1b[0m it goes on on")
        assert "\x1b[2mHmm\x1b[0m" in shown
        chat.process.send_signal(signal.SIGINT)
        chat.wait_for("(stopped)")
        chat.type("and?")
        chat.wait_for("\x1b[3myes\x1b[0m")
        chat.type("/quit")
        assert chat.process.wait(PATIENCE_S) == 0
        roles = [message["role"] for message in server.bodies[1]["messages"]]
        assert roles == ["user", "assistant", "user"]
        assert server.bodies[1]["messages"][1]["content"].startswith("**so** it goes on")


# -- a real server ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with serving(folder, "--api-key", "secret", "--log-level", "warning") as server:
        yield server


def test_a_conversation_with_a_real_server(live: ServerProcess) -> None:
    stdin = "hello\n/system Be\\\nbrief.\nagain\n/reset\nonce more\n/quit\n"
    flags = ("--max-tokens", "20", "--temperature", "0", "--draft-depth", "2")
    result = outrider("chat", "--url", live.url, *flags, stdin=stdin, OUTRIDER_API_KEY="secret")
    assert (result.returncode, result.stderr) == (0, "")
    assert f"tiny at {live.url}." in result.stdout
    assert result.stdout.count("tokens/s; first token after") == 3
    assert result.stdout.count("drafts accepted") == 3
    assert "\x1b" not in result.stdout


def test_an_error_is_one_line_and_the_conversation_goes_on(live: ServerProcess) -> None:
    flags = ("--api-key", "secret", "--max-tokens", "3")
    result = outrider("chat", "other", "--url", live.url, *flags, stdin="hello\nhello\n")
    assert result.returncode == 0
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("outrider: the server answered 404: ") and "other" in line for line in lines)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--url", "URL", "--api-key", "wrong"], "the server answered 401"),
        (["--url", "127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["--url", "URL", "--drafter", "ngram"], "--drafter"),
        (["--api-key", "secret"], "--url"),
    ],
)
def test_a_chat_that_cannot_begin_is_one_clear_line(
    live: ServerProcess, args: list[str], message: str
) -> None:
    result = outrider("chat", *[live.url if arg == "URL" else arg for arg in args])
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
