"""One line of the access log for each request, with what it did."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from asgi_caller import Caller
from fake_backend import HELLO, THOUGHT, USAGE, USER, Client, FakeBackend, FakeStream, Gate, server

from outrider.chat.events import ChatEvent, Finished
from outrider.cli.log_format import JsonFormatter, TextFormatter
from outrider.engine.sequence import Stats

STATS = Stats(
    num_prompt=7,
    num_generated=5,
    num_cached=3,
    steps=2,
    drafted=[2, 2],
    accepted=[2, 1],
    preemptions=1,
    submitted_s=1.0,
    queue_s=0.004,
    ttft_s=0.104,
    total_s=0.3,
)
ENDED: tuple[ChatEvent, ...] = (*THOUGHT[:-1], Finished("stop", USAGE, STATS))


class PictureBackend(FakeBackend):
    def _stream(self, request: Any) -> FakeStream:
        stream = super()._stream(request)
        stream.num_images, stream.num_prefilled = 2, 7
        return stream


def entries(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """The lines of requests as text and as JSON."""
    records = [record for record in caplog.records if record.name == "outrider.access"]
    text, as_json = TextFormatter("%(message)s"), JsonFormatter()
    return [(text.format(record), json.loads(as_json.format(record))) for record in records]


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_has_one_line_with_all_that_it_did(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    body = {"messages": USER, "stream": stream}
    Client(server(PictureBackend(ENDED))).post("/v1/chat/completions", body)
    ((text, entry),) = entries(caplog)
    assert text.startswith("POST /v1/chat/completions 200 ")
    assert text.endswith(
        " ms: prompt 7 tokens (3 cached), 2 images, queued 4 ms, prompt read in 100 ms, "
        "answer 5 tokens (2 reasoning), stride 2.50, drafts 3/4, 1 preemptions, stop"
    )
    assert entry.pop("prepare_s") >= 0
    names = ("method", "path", "route", "status", "duration_s", "key", "reason")
    assert all(name in entry for name in names)
    skipped = {*names, "time", "level", "logger", "request_id", "message"}
    assert {name: value for name, value in entry.items() if name not in skipped} == {
        "api": "chat",
        "model": "tiny",
        "answers": 1,
        "finish": ["stop"],
        "prompt_tokens": 7,
        "prompt_tokens_done": 7,
        "cached_tokens": 3,
        "skipped_tokens": 0,
        "images": 2,
        "tokens": 5,
        "reasoning_tokens": 2,
        "drafted_tokens": 4,
        "accepted_tokens": 3,
        "preemptions": 1,
        "steps": 2,
        "stride": 2.5,
        "queue_s": 0.004,
        "prompt_s": 0.1,
    }


def test_skipped_tokens_of_a_prompt_are_told(caplog: pytest.LogCaptureFixture) -> None:
    ended = Finished("stop", USAGE, replace(STATS, num_skipped=4))
    Client(server(FakeBackend((*THOUGHT[:-1], ended)))).post("/v1/chat/completions", {"messages": USER})
    ((text, entry),) = entries(caplog)
    assert entry["skipped_tokens"] == 4
    assert "prompt 7 tokens (3 cached) (4 skipped)" in text


def test_several_answers_are_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    Client(server(FakeBackend(ENDED))).post("/v1/chat/completions", {"messages": USER, "n": 3})
    ((_, entry),) = entries(caplog)
    assert (entry["answers"], entry["tokens"], entry["drafted_tokens"]) == (3, 15, 12)
    assert (entry["prompt_tokens"], entry["stride"]) == (7, 2.5)


def test_a_client_that_left_has_its_line_too(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(num_events=1)
    made = server(PictureBackend(HELLO, gate=gate))

    async def run() -> None:
        caller = Caller("/v1/messages", {"messages": USER, "max_tokens": 5, "stream": True})
        calling = asyncio.create_task(caller.call(made))
        await gate.holds.wait()
        caller.gone.set()
        await calling

    asyncio.run(run())
    ((text, entry),) = entries(caplog)
    assert text.endswith("answer 5 tokens, abandoned (client_closed)")
    assert (entry["status"], entry["finish"], entry["prompt_tokens_done"]) == (499, ["abandoned"], 7)
    assert "stride" not in entry


def test_requests_without_answers_and_refused_ones_say_no_more_than_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client(server(FakeBackend()))
    client.get("/v1/models")
    client.post("/v1/chat/completions", {"messages": []})
    for text, entry in entries(caplog):
        assert "prompt" not in text
        assert "tokens" not in entry


def test_an_answer_without_figures_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    ended = (*HELLO[:-1], Finished("length", replace(USAGE, num_reasoning=0)))
    Client(server(FakeBackend(ended))).post("/v1/completions", {"prompt": "a"})
    ((text, _),) = entries(caplog)
    assert text.endswith(" ms: prompt 7 tokens, answer 5 tokens, length")
