"""The HTTP client against servers with odd manners."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import fields
from typing import Any

import pytest
from raw_server import Step, chunk, head, raw_server

from outrider.bench.answer import Answer, DraftCounts
from outrider.bench.errors import BenchFailed
from outrider.bench.http_target import HttpTarget, connect, parse_metrics, request_body
from outrider.bench.streamed_answer import read_answer
from outrider.bench.target import RequestOptions
from outrider.bench.workloads import Task
from outrider.chat_client import MAX_EVENT_BYTES, ChatChunk, ChatClient
from outrider.request import SamplingDefaults, SamplingParams
from outrider.server_address import ServerAddress
from patience import PATIENCE_S
from scripted_server import Reply, refuses, scripted, stream

TASK = Task("Hi")
OPTIONS = RequestOptions(0.5, 9, 3, None)
DONE = b"data: [DONE]\n\n"


def ask(url: str, timeout_s: float = PATIENCE_S, task: Task = TASK) -> Answer:
    client = ChatClient(ServerAddress.parse(url), "test", timeout_s)
    target = HttpTarget("t", client, "m", None)
    return asyncio.run(target.ask(task, OPTIONS))


def event(content: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {} if content is None else {"content": content}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


# -- what is asked ---------------------------------------------------------------------------------------


def test_every_parameter_with_differing_defaults_is_given_and_no_depth_to_a_stranger() -> None:
    assert request_body("m", TASK, OPTIONS) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 1.0,
        "seed": 3,
    }


def test_filters_of_the_model_are_switched_off_at_an_outrider() -> None:
    with scripted([stream({"content": "a"})]) as server:
        client = ChatClient(ServerAddress.parse(server.url), "test", PATIENCE_S)
        asyncio.run(HttpTarget("t", client, "m", {"server": "outrider"}).ask(TASK, OPTIONS))
    (body,) = server.bodies
    given = {field.name: body[field.name] for field in fields(SamplingDefaults)}
    assert SamplingDefaults(**given).params() == SamplingParams(temperature=OPTIONS.temperature)


def test_a_depth_and_a_schema_are_asked_for() -> None:
    body = request_body(
        "m", Task("Hi", schema={"type": "object"}, kind="constrained"), RequestOptions(0, 9, 3, 0)
    )
    assert body["draft_depth"] == 0
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "ignore_eos" not in body


def test_greedy_requests_carry_no_seed() -> None:
    """mlx_lm.server answers requests with a seed one after the other."""
    assert "seed" not in request_body("m", TASK, RequestOptions(0, 9, 3, None))


# -- counting --------------------------------------------------------------------------------------------


def test_usage_counts_the_tokens() -> None:
    usage = {
        "prompt_tokens": 8,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
    with scripted(
        [stream({"role": "assistant", "content": ""}, {"content": "Hello"}, usage=usage)]
    ) as server:
        found = ask(server.url)
    assert (found.error, found.text, found.finish_reason) == (None, "Hello", "stop")
    assert (found.num_tokens, found.token_source) == (5, "usage")
    assert (found.num_prompt, found.num_cached) == (8, 6)


def test_without_usage_chunks_are_counted_and_it_is_said() -> None:
    reply = stream({"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"})
    with scripted([reply]) as server:
        found = ask(server.url)
    assert (found.num_tokens, found.token_source) == (2, "chunks")


def test_usage_in_every_chunk_counts_once() -> None:
    lines = [
        event("a", usage={"completion_tokens": 1}),
        event("b", "length", usage={"completion_tokens": 2}),
        DONE,
    ]
    with scripted([Reply(lines)]) as server:
        assert ask(server.url).num_tokens == 2


def test_reasoning_counts_as_text_that_came() -> None:
    with scripted([stream({"reasoning_content": "Hm."}, {"content": "Yes"})]) as server:
        found = ask(server.url)
    assert (found.num_tokens, found.text) == (2, "Yes")


def test_an_answer_without_a_word_has_no_first_token() -> None:
    with scripted([stream({"role": "assistant", "content": ""}, usage={"completion_tokens": 1})]) as server:
        found = ask(server.url)
    assert (found.error, found.num_tokens, found.ttft_s, found.arrivals) == (None, 1, None, ())


# -- timing ----------------------------------------------------------------------------------------------


def chunks(url: str, on_chunk: Callable[[], None] = lambda: None) -> list[ChatChunk]:
    async def read() -> list[ChatChunk]:
        found = []
        async with aclosing(ChatClient(ServerAddress.parse(url), "test", 30.0).stream_chat({})) as stream:
            async for one in stream:
                found.append(one)
                on_chunk()
        return found

    return asyncio.run(read())


@pytest.mark.parametrize(("headers", "wrap"), [((), bytes), (("Transfer-Encoding: chunked",), chunk)])
def test_an_event_is_seen_before_the_next_one_is_sent(
    headers: tuple[str, ...], wrap: Callable[[bytes], bytes]
) -> None:
    """The client buffers nothing: the server waits for the client after each event."""
    seen = threading.Semaphore(0)
    steps: list[Step] = [head(*headers), wrap(b": keep-alive\n\n")]
    for _ in range(5):
        steps += [wrap(event("a")), lambda: seen.acquire(timeout=20)]
    with raw_server([*steps, wrap(event(None, "stop") + DONE)]) as url:
        found = chunks(url, seen.release)
    times = [one.read_at_s for one in found]
    assert [one.text for one in found] == ["a"] * 5 + [""]
    assert sorted(set(times)) == times


def test_events_of_one_read_have_the_same_time() -> None:
    with raw_server(
        [head("Transfer-Encoding: chunked"), chunk(event("a") + event("b", "stop") + DONE)]
    ) as url:
        first, second = chunks(url)
    assert first.read_at_s == second.read_at_s


async def stream_of(*found: ChatChunk) -> AsyncIterator[ChatChunk]:
    for one in found:
        yield one


def answer_of(*found: ChatChunk) -> Answer:
    return asyncio.run(read_answer(TASK, 10.0, stream_of(*found)))


def pairs(found: Answer) -> list[tuple[float, float]]:
    return [(arrival.s, arrival.num_tokens) for arrival in found.arrivals]


def test_the_first_token_is_the_first_text_not_a_role() -> None:
    found = answer_of(ChatChunk(11.0), ChatChunk(12.0, "a"), ChatChunk(13.0, "b", finish_reason="stop"))
    assert (found.ttft_s, found.ended_s) == (2.0, 13.0)
    assert pairs(found) == [(2.0, 1), (3.0, 1)]


def test_chunks_of_one_read_are_one_arrival() -> None:
    found = answer_of(ChatChunk(11.0, "a"), ChatChunk(11.0, "b"), ChatChunk(12.0, "c"))
    assert pairs(found) == [(1.0, 2), (2.0, 1)]


def test_tokens_are_shared_out_by_characters_if_chunks_are_fewer() -> None:
    usage = ChatChunk(14.0, usage={"completion_tokens": 10})
    found = answer_of(ChatChunk(11.0, "a"), ChatChunk(12.0, "bbbb"), ChatChunk(13.0, "ccccc"), usage)
    assert pairs(found) == [(1.0, 1), (2.0, 4), (3.0, 5)]
    assert found.ended_s == 14.0


def test_an_end_token_without_text_leaves_one_token_per_chunk() -> None:
    words = [ChatChunk(11.0 + i, "word " if i % 2 else "a") for i in range(39)]
    found = answer_of(*words, ChatChunk(60.0, finish_reason="stop", usage={"completion_tokens": 40}))
    assert {tokens for _, tokens in pairs(found)} == {40 / 39}


# -- the wire --------------------------------------------------------------------------------------------


def test_chunked_bodies_may_be_cut_anywhere() -> None:
    whole = event("Hé") + event("llo", "stop") + DONE
    whole = whole.replace(b"\\u00e9", "é".encode())
    for size in (1, 7, len(whole)):
        parts = [chunk(whole[i : i + size]) for i in range(0, len(whole), size)]
        with raw_server([head("Transfer-Encoding: chunked"), *parts, b"0\r\n\r\n"]) as url:
            assert ask(url).text == "Héllo"


def test_bodies_with_a_length_and_lines_with_carriage_returns() -> None:
    body = (event("Hi", "stop") + DONE).replace(b"\n", b"\r\n")
    with raw_server([b"HTTP/1.1 100 Continue\r\n\r\n", head(f"Content-Length: {len(body)}"), body]) as url:
        assert ask(url).text == "Hi"


def test_an_event_without_an_end_is_refused() -> None:
    with raw_server([head(), *[b"x" * (MAX_EVENT_BYTES // 8)] * 9]) as url:
        assert "without the end of an event" in (ask(url).error or "")


def test_keep_alive_comments_are_no_chunks() -> None:
    with raw_server([head(), b": keep-alive\n\n" * 3, event("Hi", "stop"), DONE]) as url:
        assert [one.text for one in chunks(url)] == ["Hi"]


def test_a_stream_may_end_without_done_once_it_has_said_why() -> None:
    with raw_server([head(), event("Hi", "stop")]) as url:
        assert ask(url).error is None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([head(), event("Hel")], "hung up in the middle"),
        ([head("Content-Length: 900"), event("Hel")], "hung up .*received 87 bytes"),
        ([head("Transfer-Encoding: chunked"), chunk(event("Hel"))], "hung up"),
        ([head("Transfer-Encoding: chunked"), b"zz\r\n"], "does not speak HTTP"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "does not speak HTTP"),
        ([], "hung up|broke"),
        ([head(), b"data: nonsense\n\n"], "not a JSON object"),
        ([head(), b'data: {"choices": [1]}\n\n'], "not a chunk of a chat completion"),
        (
            [head(), b'data: {"choices": [{"delta": {"content": [1]}}]}\n\n'],
            "not a chunk of a chat completion",
        ),
        ([head(), b'data: {"error": {"message": "it broke"}}\n\n'], "the server reports: it broke"),
        (
            [head("Content-Type: application/json"), b"{}"],
            "answered with application/json, not with a stream of events",
        ),
        ([head(status="500 Oh"), b"<html>"], "the server answered 500: Oh"),
        ([head(status="422 No"), b'{"detail": "bad"}'], "the server answered 422: bad"),
        ([head(), event("a"), 30.0], "silent for 0.3 seconds"),
        ([30.0, head()], "silent for 0.3 seconds"),
    ],
)
def test_what_goes_wrong_is_in_the_answer(script: list[Any], message: str) -> None:
    with raw_server(script) as url:
        found = ask(url, timeout_s=0.3 if "silent" in message else PATIENCE_S)
    assert re.search(message, found.error or "")


def test_a_refusal_is_told_in_the_server_s_words() -> None:
    with scripted([refuses(404, "the model m does not exist")]) as server:
        assert ask(server.url).error == "the server answered 404: the model m does not exist"


# -- who is there ----------------------------------------------------------------------------------------


def test_a_foreign_server_is_one_that_has_no_status() -> None:
    with scripted([]) as server:
        target = asyncio.run(connect(None, ServerAddress.parse(server.url), None, 5.0))
    assert (target.model, target.can_draft, target.memory_source) == ("first", False, None)
    assert target.name == server.url.removeprefix("http://")
    assert asyncio.run(target.draft_counts()) is None


def test_a_users_key_is_not_enough_for_an_outrider() -> None:
    body = b'{"error": {"message": "/v1/status needs an operator\'s key, and \'alice\' is a user\'s key"}}'
    refusal = [head(f"content-length: {len(body)}", status="403 Forbidden"), body]
    with (
        raw_server(refusal, refusal) as url,
        pytest.raises(BenchFailed, match="Give an operator's key with --api-key"),
    ):
        asyncio.run(connect("x", ServerAddress.parse(url), "m", 5.0))


def test_nobody_there_is_said_even_if_the_model_is_named() -> None:
    for model in (None, "m"):
        with pytest.raises(BenchFailed, match=r"cannot reach http://127.0.0.1:9: Connection refused"):
            asyncio.run(connect(None, ServerAddress.parse("127.0.0.1:9"), model, 5.0))


def test_a_server_that_names_no_model_needs_one() -> None:
    not_found = [head(status="404 No"), b"no"]
    with raw_server(not_found, not_found) as url, pytest.raises(BenchFailed, match="give its name as MODEL"):
        asyncio.run(connect(None, ServerAddress.parse(url), None, 5.0))
    with raw_server(not_found, not_found) as url:
        assert asyncio.run(connect("x", ServerAddress.parse(url), "m", 5.0)).model == "m"


def test_a_process_that_cannot_be_watched_is_refused() -> None:
    with scripted([]) as server, pytest.raises(BenchFailed, match="--pid 999999999"):
        asyncio.run(connect(None, ServerAddress.parse(server.url), None, 5.0, 999999999))


def test_draft_counts_are_read_from_metrics() -> None:
    text = """# HELP outrider_drafted_tokens_total Drafts
outrider_drafted_tokens_total{position="1"} 30.0
outrider_drafted_tokens_total{position="2"} 20.0
outrider_accepted_tokens_total{position="1"} 15.0
outrider_accepted_tokens_total{position="2"} 5.0
outrider_stride_tokens_bucket{le="1.0"} 20.0
outrider_stride_tokens_count 40.0
outrider_stride_tokens_sum 60.0
python_info{version="3"} 1.0
"""
    assert parse_metrics(text) == DraftCounts(40, 60, (30, 20), (15, 5))
