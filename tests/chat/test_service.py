"""The service with a scripted engine: what it asks of the engine, and what it makes of the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from answers import ANSWERS, CLOCK, WEATHER
from chat_tokenizers import BARE, CHATML, SPECIAL, new_tokenizer
from fake_engine import STATS, FakeEngine

from outrider.answer_form import Grammar
from outrider.chat.conversation import ChatRequest, MediaPart, Message, NamedTool, TextPart, Tool, ToolCall
from outrider.chat.events import ChatEvent, Finished, ReasoningDelta, TextDelta, ToolCallStarted, Usage
from outrider.chat.renderer import ChatRenderer
from outrider.chat.service import ChatService
from outrider.engine.engine import EngineStopped
from outrider.request import InvalidRequest, SamplingParams
from patience import Hurdle, goes_on_while_held

TOOLS = (WEATHER, CLOCK)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{% if tools is string %}<|channel|>{% endif %}"
)
HARMONY_TOKENS = (
    "<|im_end|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
)
OPENED = CHATML + "<think>\n"
CALL = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'


def request_for(text: str = "hi", params: SamplingParams | None = None, **changes: Any) -> ChatRequest:
    return ChatRequest([Message("user", (TextPart(text),))], params or SamplingParams(), **changes)


def new_service(
    engine: FakeEngine, template: str = CHATML, special: tuple[str, ...] = SPECIAL
) -> ChatService:
    renderer = ChatRenderer(new_tokenizer(template, special))
    return ChatService(engine, renderer)  # type: ignore[arg-type]


def answer(
    pieces: Sequence[str], request: ChatRequest, template: str = CHATML, **settings: Any
) -> tuple[list[ChatEvent], FakeEngine]:
    engine = FakeEngine(pieces, settings.pop("finish", "stop"))

    async def read() -> list[ChatEvent]:
        return [event async for event in await new_service(engine, template, **settings).start(request)]

    return asyncio.run(read()), engine


def finished(events: Sequence[ChatEvent]) -> Finished:
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Finished) for event in events) == 1
    return events[-1]


def test_an_answer_is_text_and_an_end_with_figures() -> None:
    events, engine = answer(["Hel", "lo"], request_for())
    assert events[:-1] == [TextDelta("Hel"), TextDelta("lo")]
    assert finished(events).reason == "stop"
    assert finished(events).stats == STATS
    assert finished(events).usage == Usage(7, 0, 100, 0, 35, 15)
    assert engine.validated == engine.submitted


def test_a_call_ends_the_answer_as_tool_calls() -> None:
    events, _ = answer(list(CALL), request_for(tools=TOOLS))
    assert isinstance(events[0], ToolCallStarted)
    assert finished(events).reason == "tool_calls"


def test_tool_choice_none_hides_the_tools_and_reads_no_calls() -> None:
    events, engine = answer([CALL], request_for(tools=TOOLS, tool_choice="none"))
    assert events[:-1] == [TextDelta(CALL)]
    assert engine.prompt_ids == answer([""], request_for())[1].prompt_ids


@pytest.mark.parametrize("finish", ["length", "cancelled", "error"])
def test_an_answer_that_was_cut_short_says_so(finish: Any) -> None:
    events, _ = answer(["a <tool"], request_for(tools=TOOLS), finish=finish)
    if finish != "cancelled":  # the fake says nothing then
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "a <tool"
    assert finished(events).reason == finish
    assert finished(events).error == ("it broke" if finish == "error" else None)


def test_calls_that_may_not_be_parallel_stop_the_engine_after_the_first() -> None:
    request = request_for(tools=TOOLS, parallel_tool_calls=False)
    events, engine = answer([CALL, CALL, "more"], request)
    assert sum(isinstance(event, ToolCallStarted) for event in events) == 1
    assert engine.aborted == ["r"]
    assert finished(events).reason == "tool_calls"
    assert finished(events).usage.num_generated == 100


def test_reasoning_is_counted_in_tokens() -> None:
    events, _ = answer(["<think>h", "m!</think>", "Hi"], request_for())
    assert [e for e in events if not isinstance(e, Finished)] == [
        ReasoningDelta("h"),
        ReasoningDelta("m!"),
        TextDelta("Hi"),
    ]
    assert finished(events).usage.num_reasoning == 3


def test_an_answer_starts_in_the_reasoning_that_the_prompt_opened() -> None:
    events, _ = answer(["hm</think>Hi"], request_for(), OPENED)
    assert events[:-1] == [ReasoningDelta("hm"), TextDelta("Hi")]


def test_a_prediction_becomes_drafts() -> None:
    _, engine = answer([""], request_for(prediction="ab"))
    assert engine.params.prediction_ids == tuple(new_tokenizer().encode("ab", add_special_tokens=False))


# -- what the prompt says of tools -------------------------------------------------------------------------


def prompt_text(request: ChatRequest, template: str) -> str:
    _, engine = answer([""], request, template)
    return str(new_tokenizer().decode(list(engine.prompt_ids)))


def test_a_template_that_knows_tools_is_given_them() -> None:
    assert '"name": "get_weather"' in prompt_text(request_for(tools=TOOLS), CHATML)


def test_a_model_whose_template_knows_no_tools_is_told_of_them() -> None:
    text = prompt_text(request_for(tools=TOOLS), BARE)
    assert text.startswith("<|im_start|>system\nYou can call these functions:\n")
    assert "<tool_call>" in text
    assert prompt_text(request_for(), BARE) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_what_it_is_told_goes_after_the_clients_own_system_message() -> None:
    messages = [Message("system", (TextPart("Be kind."),)), Message("user", (TextPart("hi"),))]
    request = ChatRequest(messages, SamplingParams(), TOOLS)
    assert prompt_text(request, BARE).startswith("<|im_start|>system\nBe kind.\n\nYou can call")


# -- special tokens that the answer is read by -------------------------------------------------------------


def test_markers_that_are_special_tokens_are_shown_to_the_parser_and_other_special_tokens_to_nobody() -> None:
    template = BARE + "{% if tools and tools is string %}[TOOL_CALLS] [ARGS]{% endif %}"
    text = ANSWERS["mistral"][0][0]
    events, engine = answer(["<|im_start|>", text], request_for(tools=TOOLS), template)
    assert not engine.params.skip_special_tokens
    assert [type(event).__name__ for event in events].count("ToolCallStarted") == 2
    assert not any(isinstance(event, TextDelta) for event in events)


def test_without_need_the_engine_hides_special_tokens_itself() -> None:
    _, engine = answer([""], request_for(tools=TOOLS))
    assert engine.params.skip_special_tokens


def test_harmony_is_read_by_its_channels_and_stops_at_a_call() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + ANSWERS["harmony"][0][0]
    events, engine = answer(list(text), request_for(tools=TOOLS), HARMONY, special=HARMONY_TOKENS)
    assert [type(event).__name__ for event in events[:2]] == ["ReasoningDelta", "ReasoningDelta"]
    assert finished(events).reason == "tool_calls"
    assert HARMONY_TOKENS.index("<|call|>") in engine.params.stop_token_ids


# -- grammars ----------------------------------------------------------------------------------------------


def test_a_forced_call_has_a_grammar_and_is_streamed() -> None:
    request = request_for(
        tools=TOOLS, tool_choice=NamedTool("clock"), template_kwargs={"enable_thinking": False}
    )
    head = '<tool_call>\n{"name": "clock", "arguments": '
    events, engine = answer([head, "{", "}", "}\n</tool_call>"], request)
    assert engine.params.grammar is not None
    assert engine.params.grammar.kind == "lark"
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["ToolCallStarted", "ToolCallArguments", "ToolCallArguments", "ToolCallEnded", "Finished"]


def test_a_model_that_is_free_to_think_is_made_to_where_a_grammar_waits_for_it() -> None:
    form = Grammar("json_object")
    events, engine = answer(["hm</think>{}"], request_for(grammar=form))
    end = new_tokenizer().convert_tokens_to_ids("</think>")
    assert engine.params.grammar == Grammar("json_object", "", (end,))
    assert str(new_tokenizer().decode(list(engine.prompt_ids))).endswith("assistant\n<think>")
    assert events[:-1] == [ReasoningDelta("hm"), TextDelta("{}")]


def test_a_model_that_will_not_think_starts_its_grammar_at_once() -> None:
    form = Grammar("json_object")
    _, engine = answer(["{}"], request_for(grammar=form, template_kwargs={"enable_thinking": False}))
    assert engine.params.grammar == form


# -- refusals and the event loop ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": (CLOCK, CLOCK)}, "two tools have the same name"),
        ({"tools": TOOLS, "tool_choice": NamedTool("x")}, "not among the tools"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"template_kwargs": {"chat_template": "x"}}, "chat_template"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_queued(changes: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(new_service(engine).start(request_for(**changes)))
    assert engine.submitted == []


def test_images_are_refused() -> None:
    request = ChatRequest([Message("user", (MediaPart("image", "data:,"),))], SamplingParams())
    with pytest.raises(InvalidRequest, match="reads text only"):
        asyncio.run(new_service(FakeEngine()).start(request))


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "required"},  # the prompt opens the reasoning: see grammars.py
        {"grammar": Grammar("json_object")},
        {"grammar": Grammar("json_object"), "template_kwargs": {"enable_thinking": False}},
    ],
)
def test_tokens_are_counted_as_an_answer_counts_them_without_queueing_anything(
    changes: dict[str, Any],
) -> None:
    engine, request = FakeEngine(), request_for("hello", **changes)
    num = asyncio.run(new_service(engine).count_tokens(request))
    assert num == len(answer([""], request)[1].prompt_ids)
    assert engine.submitted == []


def test_each_request_is_validated_once_and_not_on_the_event_loop() -> None:
    engine = FakeEngine(["a"])
    service = new_service(engine)

    async def go() -> None:
        for stream in (
            await service.start(request_for(tools=TOOLS)),
            *(await service.prepare_text("Once", SamplingParams())).start(),
            *(await service.prepare_text([1, 2, 3], SamplingParams())).start(),
        ):
            stream.abort()

    asyncio.run(go())
    assert len(engine.validated) == 3
    assert engine.validated == engine.submitted
    names = [name.rpartition("_")[0] for name in engine.validating_threads]
    assert names == ["outrider-grammar", "outrider-chat", "outrider-chat"]  # tools have a grammar


def test_a_long_prompt_does_not_hold_up_the_event_loop() -> None:
    service = new_service(FakeEngine())
    vocabulary, hurdle = service._renderer._vocabulary, Hurdle()
    encode = vocabulary.encode

    def slow_encode(text: str) -> list[int]:
        hurdle.stop()
        return encode(text)

    vocabulary.encode = slow_encode  # type: ignore[method-assign]

    async def run() -> None:
        task = asyncio.create_task(service.start(request_for()))
        await goes_on_while_held(hurdle)
        await task

    asyncio.run(run())


def test_leaving_the_stream_aborts_the_request() -> None:
    engine = FakeEngine(["a", "b", "c"])

    async def leave() -> None:
        async for _ in await new_service(engine).start(request_for()):
            break
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert engine.stream.is_aborted


def test_a_stream_that_is_never_read_is_aborted_by_its_context() -> None:
    engine = FakeEngine(["a"])

    async def leave() -> None:
        async with await new_service(engine).start(request_for()) as stream:
            assert stream.request_id == "r"

    asyncio.run(leave())
    assert engine.stream.is_aborted


# -- several answers -------------------------------------------------------------------------------------


def test_answers_of_one_request_share_its_rendering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(["a"])
    service = new_service(engine)
    rendered = []
    render = service._renderer.render

    def count_and_render(request: ChatRequest) -> Any:
        rendered.append(request)
        return render(request)

    monkeypatch.setattr(service._renderer, "render", count_and_render)

    async def go() -> None:
        prepared = await service.prepare(request_for(params=SamplingParams(seed=5)), num_answers=3)
        assert not engine.submitted
        streams = prepared.start()
        assert prepared.num_tokens == 3 * len(streams[0].prompt_ids)

    asyncio.run(go())
    assert len(rendered) == len(engine.validated) == 1
    assert [sent.request.params.seed for sent in engine.submitted] == [5, 6, 7]
    assert len({sent.id for sent in engine.submitted}) == 3


def test_answers_that_cannot_all_be_queued_do_not_run() -> None:
    engine = FakeEngine(["a"])
    engine.max_submitted = 2

    async def go() -> None:
        prepared = await new_service(engine).prepare(request_for(), num_answers=3)
        with pytest.raises(EngineStopped):
            prepared.start()

    asyncio.run(go())
    assert engine.stream.is_aborted


def test_each_answer_has_a_parser_of_its_own() -> None:
    prompt = ChatRenderer(new_tokenizer(CHATML)).render(request_for(tools=TOOLS))
    first, second = prompt.new_parser(), prompt.new_parser()
    list(first.push(CALL))
    assert first.num_calls == 1
    assert second.num_calls == 0


# -- long prompts ----------------------------------------------------------------------------------------


def limited(engine: FakeEngine, max_context: int) -> ChatService:
    return ChatService(engine, ChatRenderer(new_tokenizer(), max_context=max_context))  # type: ignore[arg-type]


PLACES: dict[str, Callable[[str], ChatRequest]] = {
    "text": request_for,
    "reasoning": lambda text: ChatRequest([Message("assistant", (), text)], SamplingParams()),
    "arguments": lambda text: ChatRequest(
        [Message("assistant", (), None, (ToolCall("1", "clock", text),))], SamplingParams()
    ),
    "description": lambda text: request_for(tools=(Tool("a", text),)),
    "schema": lambda text: request_for(tools=(Tool("a", "", {"properties": {text: {}}}),)),
    "template variables": lambda text: request_for(template_kwargs={"x": [text]}),
    "prediction": lambda text: request_for(prediction=text),
}


@pytest.mark.parametrize("place", PLACES)
def test_text_that_cannot_fit_is_refused_before_it_is_rendered(place: str) -> None:
    """Nothing runs on the service's thread: its executor is shut down."""
    service = limited(FakeEngine(), max_context=100)
    service.close()
    with pytest.raises(InvalidRequest, match="characters and the context holds 100 tokens"):
        asyncio.run(service.prepare(PLACES[place]("x" * 3201)))
    with pytest.raises(InvalidRequest, match="characters and the context holds 100 tokens"):
        asyncio.run(service.count_tokens(PLACES[place]("x" * 3201)))


def test_bare_text_that_cannot_fit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    service = limited(FakeEngine(), max_context=100)
    monkeypatch.setattr(service._renderer._vocabulary, "encode_prompt", None)
    with pytest.raises(InvalidRequest, match="3,201 characters"):
        asyncio.run(service.prepare_text("x" * 3201, SamplingParams()))


@pytest.mark.parametrize("text", ["x" * 3000, "<|im_end|>" * 300], ids=["plain", "special tokens"])
def test_only_the_first_part_of_a_long_text_is_encoded(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = limited(FakeEngine(), max_context=100)
    encoded: list[str] = []
    encode = service._renderer._vocabulary.encode

    def count_and_encode(text: str) -> list[int]:
        encoded.append(text)
        return encode(text)

    monkeypatch.setattr(service._renderer._vocabulary, "encode", count_and_encode)
    with pytest.raises(InvalidRequest, match=r"tokens and the context holds 100 tokens"):
        asyncio.run(service.prepare(request_for(text)))
    assert sum(map(len, encoded)) <= 8 * 100 + 10


def test_short_prompt_waits_for_one_long_prompt_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.chat.service.LONG_PROMPT", 100)
    service = new_service(FakeEngine(["a"]))
    order: list[str] = []
    hurdle = Hurdle()
    render = service._renderer.render

    def slow(request: ChatRequest) -> Any:
        hurdle.stop()
        order.append(request.messages[0].text[:1])
        return render(request)

    monkeypatch.setattr(service._renderer, "render", slow)

    async def go() -> None:
        texts = ["l" * 101, "l" * 101, "l" * 101, "short"]
        tasks = [asyncio.create_task(service.prepare(request_for(text))) for text in texts]
        await goes_on_while_held(hurdle)
        await asyncio.gather(*tasks)

    asyncio.run(go())
    assert order == ["l", "s", "l", "l"]


LONG: dict[str, ChatRequest] = {
    "text": request_for("x" * 100_001),
    "messages": ChatRequest(request_for("").messages * 5_000, SamplingParams()),  # type: ignore[operator]
    "numbers": request_for(tools=(Tool("a", "", {"enum": [0] * 25_000}),)),
}


@pytest.mark.parametrize("kind", LONG)
def test_long_prompts_take_turns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service, rendered, hurdle = new_service(FakeEngine()), [], Hurdle()
    short = request_for("short")

    def render(request: ChatRequest) -> Any:
        hurdle.stop()
        rendered.append("short" if request is short else "long")
        raise InvalidRequest("enough")

    monkeypatch.setattr(service._renderer, "render", render)

    async def go() -> None:
        requests = (LONG[kind], LONG[kind], short)
        prepared = [asyncio.create_task(service.prepare(request)) for request in requests]
        await goes_on_while_held(hurdle)
        await asyncio.gather(*prepared, return_exceptions=True)

    asyncio.run(go())
    assert rendered == ["long", "short", "long"]
