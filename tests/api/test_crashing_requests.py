"""Requests that used to end the server process: each gets its own refusal, and the server serves on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from hostile_grammars import reference_chain, rule_chain, wide_schema
from server_process import ServerProcess

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


def send(live: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return live.post(path, {"model": live.model, limit: 6, "temperature": 0, **body})


def serves_on(live: ServerProcess) -> bool:
    answer = send(live, CHAT, {"messages": MESSAGES, "guided_regex": "[ab]{3}"})
    return live.process.poll() is None and answer.status_code == 200


@pytest.mark.parametrize("field", SCHEMA_FIELDS)
def test_chain_of_references(live: ServerProcess, field: str) -> None:
    path, body = SCHEMA_FIELDS[field]
    assert send(live, path, body(reference_chain(1_000))).status_code == 200
    answer = send(live, path, body(reference_chain(5_000)))
    assert answer.status_code == 400, answer.text
    assert "too complex" in answer.json()["error"]["message"]
    assert serves_on(live)


@pytest.mark.parametrize("field", ["guided_grammar", "structured_outputs"])
def test_chain_of_rules(live: ServerProcess, field: str) -> None:
    for length, status in ((3_000, 200), (20_000, 400)):
        lark = rule_chain(length)
        value: Any = lark if field == "guided_grammar" else {"grammar": lark}
        answer = send(live, CHAT, {"messages": MESSAGES, field: value})
        assert answer.status_code == status, answer.text
    assert "too complex" in answer.json()["error"]["message"]
    assert serves_on(live)


@pytest.mark.parametrize(("num_optional", "status"), [(500, 200), (10_000, 400)])
def test_wide_schema(live: ServerProcess, num_optional: int, status: int) -> None:
    path, body = SCHEMA_FIELDS["response_format"]
    answer = send(live, path, body(wide_schema(num_optional)))
    assert answer.status_code == status, answer.text
    if status == 400:
        assert "10,000 optional properties" in answer.json()["error"]["message"]


def test_grammar_that_fails_in_an_answer_is_the_clients_error(live: ServerProcess) -> None:
    late = f"start: /[x-z]{{40}}/ %json {json.dumps(wide_schema(3_000))}"
    body = {"messages": MESSAGES, "guided_grammar": late, "max_tokens": 60}
    answer = send(live, CHAT, body)
    assert answer.status_code == 400, answer.text
    assert "the grammar" in answer.json()["error"]["message"]
    streamed = send(live, CHAT, {**body, "stream": True})
    last = json.loads([line for line in streamed.text.splitlines() if line.startswith("data: {")][-1][6:])
    assert last["error"]["code"] != "internal_error"
    assert "the grammar" in last["error"]["message"]
    assert serves_on(live)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds the server's processes in /proc")
def test_killed_worker_is_started_again(live: ServerProcess) -> None:
    assert serves_on(live)
    with open(f"/proc/{live.process.pid}/task/{live.process.pid}/children") as file:
        children = [int(process_id) for process_id in file.read().split()]
    for thread_id in os.listdir(f"/proc/{live.process.pid}/task"):
        with open(f"/proc/{live.process.pid}/task/{thread_id}/children") as file:
            children += map(int, file.read().split())
    assert children
    for process_id in set(children):
        os.kill(process_id, signal.SIGKILL)
    answer = send(live, CHAT, {"messages": MESSAGES, "guided_regex": "[cd]{3}[ef]"})
    assert answer.status_code == 200, answer.text
