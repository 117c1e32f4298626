"""The service on a real engine with a tiny model: answers, forced calls, forms, aborts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.answer_form import Grammar
from outrider.chat.conversation import ChatRequest, Message, TextPart, Tool
from outrider.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from outrider.chat.formats import hermes
from outrider.chat.formats.json_calls import listed_call
from outrider.chat.renderer import ChatRenderer
from outrider.chat.service import ChatService
from outrider.request import InvalidRequest
from patience import until
from tiny_models import write_checkpoint

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
LIGHT = Tool(
    "set_light",
    "Switch a light",
    {
        "type": "object",
        "properties": {"room": {"enum": ["hall", "attic"]}, "on": {"type": "boolean"}},
        "required": ["room", "on"],
        "additionalProperties": False,
    },
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "llama", max_position_embeddings=2048)
    with LLM(folder, drafter="ngram", max_rows=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def service(llm: LLM) -> ChatService:
    return ChatService(llm.async_engine, llm.renderer)


def request_for(text: str, params: SamplingParams = GREEDY, **changes: Any) -> ChatRequest:
    return ChatRequest([Message("user", (TextPart(text),))], params, **changes)


def text_of(events: list[ChatEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def read(service: ChatService, request: ChatRequest) -> list[ChatEvent]:
    return [event async for event in await service.start(request)]


def test_answers_are_those_of_the_python_api(llm: LLM, service: ChatService) -> None:
    questions = [f"question {i}" for i in range(6)]
    expected = [llm.chat([{"role": "user", "content": q}], GREEDY) for q in questions]

    async def together() -> list[list[ChatEvent]]:
        return await asyncio.gather(*(read(service, request_for(q)) for q in questions))

    for events, whole in zip(asyncio.run(together()), expected, strict=True):
        assert text_of(events) == whole.text
        assert isinstance(events[-1], Finished)
        assert events[-1].reason == "length"
        assert events[-1].usage.num_prompt == len(whole.prompt_token_ids)
        assert events[-1].usage.num_generated == 24


def test_plain_completions_stream_text_and_logprobs(llm: LLM, service: ChatService) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=1)
    [expected] = llm.generate(["Once upon"], params)

    async def complete(prompt: Any) -> list[ChatEvent]:
        return [event async for event in (await service.prepare_text(prompt, params)).start()[0]]

    for prompt in ("Once upon", list(expected.prompt_token_ids)):
        events = asyncio.run(complete(prompt))
        assert text_of(events) == expected.text
        logprobs = [token for event in events if isinstance(event, Logprobs) for token in event.tokens]
        assert len(logprobs) == 5


def test_a_stop_string_is_named(llm: LLM, service: ChatService) -> None:
    text = llm.generate(["abc"], GREEDY)[0].text
    stop = text[3:5]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop=["no such text", stop])

    async def complete() -> list[ChatEvent]:
        return [event async for event in (await service.prepare_text("abc", params)).start()[0]]

    events = asyncio.run(complete())
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, events[-1].stop_string) == ("stop", stop)


@pytest.mark.parametrize("seed", range(4))
def test_a_forced_call_comes_out_whole(service: ChatService, seed: int) -> None:
    params = SamplingParams(max_tokens=200, temperature=1, seed=seed)
    request = request_for("light!", params, tools=(LIGHT,), tool_choice="required", parallel_tool_calls=False)
    events = asyncio.run(read(service, request))
    assert isinstance(events[0], ToolCallStarted)
    assert events[0].name == "set_light"
    [ended] = [event for event in events if isinstance(event, ToolCallEnded)]
    fragments = [event.fragment for event in events if isinstance(event, ToolCallArguments)]
    assert "".join(fragments) == ended.arguments
    arguments = json.loads(ended.arguments)
    assert set(arguments) == {"room", "on"}
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "tool_calls"


# Hermes calls between single characters: a random model writes one of them often.
SHORT = replace(
    hermes.FORMAT,
    name="short",
    region=replace(hermes.FORMAT.region, opening=("<",), closing=(">",)),
    call_grammar=lambda tool: ("<", *listed_call(tool), ">"),
)


@pytest.mark.parametrize("seed", range(4))
def test_calls_between_free_text_keep_to_the_schema(llm: LLM, seed: int) -> None:
    service = ChatService(llm.async_engine, ChatRenderer(llm.tokenizer, tool_format=SHORT))
    (opening,) = llm.tokenizer.encode("<", add_special_tokens=False)
    params = SamplingParams(
        max_tokens=200, temperature=1, seed=seed, logit_bias={opening: 4.0}, ignore_eos=True, draft_depth=0
    )
    answers = []
    for depth in (0, "auto", 5):
        asked = request_for("light!", replace(params, draft_depth=depth), tools=(LIGHT,))
        answers.append(asyncio.run(read(service, asked)))
    events = answers[0]
    ended = [event for event in events if isinstance(event, ToolCallEnded)]
    assert len(ended) > 1
    for call in ended[:-1]:  # the last one may be cut off
        assert set(json.loads(call.arguments)) == {"room", "on"}
    assert text_of(events)
    for other in answers[1:]:
        assert text_of(other) == text_of(events)
        assert [e.arguments for e in other if isinstance(e, ToolCallEnded)] == [e.arguments for e in ended]


def test_an_answer_keeps_to_its_form(service: ChatService) -> None:
    params = SamplingParams(max_tokens=50, temperature=1, seed=3)
    events = asyncio.run(read(service, request_for("?", params, grammar=Grammar("regex", "(yes|no)!"))))
    assert text_of(events) in ("yes!", "no!")


def test_leaving_early_frees_the_row(llm: LLM, service: ChatService) -> None:
    async def leave() -> None:
        stream = await service.start(
            request_for("a long story", SamplingParams(max_tokens=1500, ignore_eos=True))
        )
        async for event in stream:
            assert isinstance(event, TextDelta)
            break
        del stream
        await until(lambda: not llm.engine._loop.live)

    asyncio.run(leave())


def test_a_prompt_that_is_too_long_is_refused(service: ChatService) -> None:
    with pytest.raises(InvalidRequest, match="tokens"):
        asyncio.run(service.start(request_for("x" * 100_000)))
