"""Requests that used to end the server process: each gets its own refusal, and the server serves on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hostile_grammars import reference_chain, rule_chain, wide_schema
from server_process import ServerProcess, serving

MESSAGES = [{"role": "user", "content": "Go on."}]
CHAT, RESPONSES, MESSAGES_ROUTE = "/v1/chat/completions", "/v1/responses", "/v1/messages"

# How a schema is sent, by the name of the field.
SCHEMA_FIELDS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "response_format": (
        CHAT,
        lambda schema: {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        },
    ),
    "guided_json": (CHAT, lambda schema: {"messages": MESSAGES, "guided_json": schema}),
    "text.format": (
        RESPONSES,
        lambda schema: {
            "input": "Go on.",
            "text": {"format": {"type": "json_schema", "name": "s", "schema": schema}},
        },
    ),
    "output_config.format": (
        MESSAGES_ROUTE,
        lambda schema: {
            "messages": MESSAGES,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    ),
}


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[ServerProcess]:
    """Without a supervisor: nobody starts it again if it dies."""
    with serving(tiny_folder, "--no-supervisor", "--max-rows", "4", "--log-level", "warning") as server:
        yield server


def send(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return server.post(path, {"model": server.model, limit: 6, "temperature": 0, **body})


def serves_on(server: ServerProcess) -> bool:
    answer = send(server, CHAT, {"messages": MESSAGES, "guided_regex": "[ab]{3}"})
    return server.process.poll() is None and answer.status_code == 200


@pytest.mark.parametrize("field", SCHEMA_FIELDS)
def test_chain_of_references(server: ServerProcess, field: str) -> None:
    path, body = SCHEMA_FIELDS[field]
    assert send(server, path, body(reference_chain(1_000))).status_code == 200
    answer = send(server, path, body(reference_chain(3_000)))
    assert answer.status_code == 400, answer.text
    assert "too complex" in answer.json()["error"]["message"]
    assert serves_on(server)


@pytest.mark.parametrize("field", ["guided_grammar", "structured_outputs"])
def test_chain_of_rules(server: ServerProcess, field: str) -> None:
    for length, status in ((3_000, 200), (10_000, 400)):
        lark = rule_chain(length)
        value: Any = lark if field == "guided_grammar" else {"grammar": lark}
        answer = send(server, CHAT, {"messages": MESSAGES, field: value})
        assert answer.status_code == status, answer.text
    assert "too complex" in answer.json()["error"]["message"]
    assert serves_on(server)


@pytest.mark.parametrize(("num_optional", "status"), [(500, 200), (5_000, 400), (10_000, 400)])
def test_wide_schema(server: ServerProcess, num_optional: int, status: int) -> None:
    path, body = SCHEMA_FIELDS["response_format"]
    answer = send(server, path, body(wide_schema(num_optional)))
    assert answer.status_code == status, answer.text
    if num_optional == 5_000:
        assert "5,000 optional properties" in answer.json()["error"]["message"]


def test_grammar_that_fails_in_an_answer_is_the_clients_error(server: ServerProcess) -> None:
    late = f"start: /[x-z]{{40}}/ %json {json.dumps(wide_schema(3_000))}"
    body = {"messages": MESSAGES, "guided_grammar": late, "max_tokens": 60}
    answer = send(server, CHAT, body)
    assert answer.status_code == 400, answer.text
    assert "the grammar" in answer.json()["error"]["message"]
    streamed = send(server, CHAT, {**body, "stream": True})
    last = json.loads([line for line in streamed.text.splitlines() if line.startswith("data: {")][-1][6:])
    assert last["error"]["code"] != "internal_error"
    assert "the grammar" in last["error"]["message"]
    assert serves_on(server)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds the server's processes in /proc")
def test_killed_worker_is_started_again(server: ServerProcess) -> None:
    assert serves_on(server)
    children: list[int] = []
    for thread_id in os.listdir(f"/proc/{server.process.pid}/task"):
        with open(f"/proc/{server.process.pid}/task/{thread_id}/children") as file:
            children += map(int, file.read().split())
    assert children
    for process_id in children:
        os.kill(process_id, signal.SIGKILL)
    answer = send(server, CHAT, {"messages": MESSAGES, "guided_regex": "[cd]{3}[ef]"})
    assert answer.status_code == 200, answer.text
