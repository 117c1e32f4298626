"""Clients that close their connection before the first token: real sockets, a real engine, held at a step."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from outrider.api.app import Server, create_server
from outrider.api.operations.metrics import Metrics
from outrider.api.settings import ServerSettings
from outrider.build import ModelChoice, build_engine
from outrider.chat.renderer import ChatRenderer
from outrider.chat.service import ChatService
from outrider.config import EngineConfig
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.engine import Engine
from patience import Hurdle, held_steps, wait_until
from tiny_models import write_checkpoint

CHUNK = 8
LONG = "why " * 150  # tokens: one for each character


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Any, Metrics]]:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama", max_position_embeddings=2048)
    config = EngineConfig(max_rows=1, prefill_step_size=CHUNK, drafter="none", prefix_cache_bytes=0)
    metrics = Metrics()
    engine, tokenizer = build_engine(ModelChoice(folder), config, metrics.steps)
    yield engine, tokenizer, metrics
    engine.close()


@contextmanager
def serving(
    parts: tuple[Engine, Any, Metrics], service: ChatService | None = None
) -> Iterator[tuple[Server, int]]:
    """An application behind a real socket: the server and its port."""
    engine, tokenizer, _ = parts
    service = service or ChatService(AsyncEngine(engine), ChatRenderer(tokenizer))
    made = create_server(service, engine.facts, tokenizer, ServerSettings(max_rows=1), metrics=Metrics())
    http_server = uvicorn.Server(uvicorn.Config(made.app, port=0, lifespan="off", log_config=None))
    thread = threading.Thread(target=http_server.run)
    thread.start()
    try:
        wait_until(lambda: http_server.started)
        yield made, http_server.servers[0].sockets[0].getsockname()[1]
    finally:
        http_server.should_exit = True
        thread.join()
        service.close()


def send(port: int, text: str, **fields: Any) -> http.client.HTTPConnection:
    """A request whose answer nobody reads."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "ignore_eos": True} | fields
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


def status_of(port: int) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/v1/status")
    return json.loads(connection.getresponse().read())


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_while_its_prompt_is_computed_frees_its_row(parts: Any, stream: bool) -> None:
    engine = parts[0]
    with serving(parts) as (made, port), held_steps(engine, num_free=3) as hurdle:
        steps_before = engine.num_steps
        leaving = send(port, LONG, stream=stream)
        wait_until(hurdle.reached.is_set)
        (request,) = status_of(port)["requests"]
        assert (request["state"], request["prompt_tokens_done"]) == ("prompt", 3 * CHUNK)
        assert request["prompt_tokens"] > len(LONG)
        leaving.close()
        wait_until(lambda: made.context.live.num_live == 0)
        hurdle.open()
        wait_until(lambda: not engine._loop.live)
        assert engine.num_steps - steps_before <= 5  # the step that was held, and none of the other 70
        answer = send(port, "and now?")  # the only row is free
        assert json.loads(answer.getresponse().read())["usage"]["completion_tokens"] == 4


def test_client_that_leaves_while_it_waits_for_a_row_never_gets_one(parts: Any) -> None:
    engine = parts[0]
    with serving(parts) as (made, port), held_steps(engine, num_free=2) as hurdle:
        first = send(port, "first")
        wait_until(hurdle.reached.is_set)
        leaving = send(port, LONG, stream=True)
        wait_until(lambda: len(made.context.live.answers) == 2)
        states = {request["prompt_tokens"] > len(LONG): request for request in status_of(port)["requests"]}
        assert (states[True]["state"], states[True]["prompt_tokens_done"]) == ("waiting", 0)
        leaving.close()
        wait_until(lambda: len(made.context.live.answers) == 1)
        hurdle.open()
        steps_before = engine.num_steps
        assert json.loads(first.getresponse().read())["usage"]["completion_tokens"] == 4
        wait_until(lambda: not engine._loop.live)
        assert engine.num_steps - steps_before < 30  # of the first request; the other one has 70 chunks


def test_client_that_leaves_while_its_prompt_is_tokenized_is_never_queued(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokenizer, _ = parts
    renderer, hurdle = ChatRenderer(tokenizer), Hurdle()
    render = renderer.render

    def held(request: Any) -> Any:
        hurdle.stop()
        return render(request)

    monkeypatch.setattr(renderer, "render", held)
    with serving(parts, ChatService(AsyncEngine(engine), renderer)) as (made, port):
        steps_before = engine.num_steps
        leaving = send(port, LONG, stream=True)
        wait_until(hurdle.reached.is_set)
        leaving.close()
        wait_until(lambda: made.context.live.num_live == 0)
        hurdle.open()
        assert json.loads(send(port, "and now?").getresponse().read())["usage"]["completion_tokens"] == 4
        assert engine.num_steps - steps_before < 30


def test_progress_of_a_prompt_in_python_and_over_http(parts: Any) -> None:
    lines: list[bytes] = []
    with serving(parts) as (_, port), held_steps(parts[0], num_free=1) as hurdle:
        for line in send(port, LONG, stream=True, return_progress=True).getresponse():
            lines.append(line)
            if b"prompt_progress" in line:  # else a slow reader might get all of it as one event
                hurdle.open()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    done = [chunk["prompt_progress"]["processed"] for chunk in chunks if "prompt_progress" in chunk]
    assert done == sorted(set(done))
    assert done[-1] == chunks[1]["prompt_progress"]["total"] > len(LONG)
    assert any("prompt_progress" in chunk for chunk in chunks[1:3])
    assert len(done) > 1
