"""The official OpenAI and Anthropic clients against a real server process with a real, tiny model."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from patience import PATIENCE_S, measures_time, wait_until
from server_process import CONTEXT, ServerProcess

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story."}]
GREEDY = {"temperature": 0.0, "max_tokens": 12}
FREE = {"extra_body": {"ignore_eos": True}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(live: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def claude(live: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=PATIENCE_S)


# -- OpenAI: chat ----------------------------------------------------------------------------------------


def test_chat(client: openai.OpenAI, live: ServerProcess) -> None:
    answer = client.chat.completions.create(model=live.model, messages=MESSAGES, **GREEDY, **FREE)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer._request_id


def _counts(usage: Any) -> tuple[int, int, int]:
    """Without what became of drafts, of which there are as many as pay at the moment."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_streamed_chat_is_the_same_text(client: openai.OpenAI, live: ServerProcess) -> None:
    whole = client.chat.completions.create(model=live.model, messages=MESSAGES, **GREEDY, **FREE)
    chunks = list(
        client.chat.completions.create(
            model=live.model,
            messages=MESSAGES,
            **GREEDY,
            **FREE,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert _counts(chunks[-1].usage) == _counts(whole.usage)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_logprobs_are_one_a_token(client: openai.OpenAI, live: ServerProcess) -> None:
    for depth in (0, 3):
        answer = client.chat.completions.create(
            model=live.model,
            messages=MESSAGES,
            **GREEDY,
            logprobs=True,
            top_logprobs=3,
            extra_body={"ignore_eos": True, "draft_depth": depth, "skip_special_tokens": False},
        )
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content or []
        assert len(content) == 12
        assert all(token.top_logprobs[0].token == token.token for token in content)  # greedy
        data = b"".join(bytes(token.bytes or []) for token in content)
        assert data.decode(errors="replace") == answer.choices[0].message.content


def test_n_choices_are_n_seeds(client: openai.OpenAI, live: ServerProcess) -> None:
    def ask(**kwargs: Any) -> list[str | None]:
        answer = client.chat.completions.create(
            model=live.model, messages=MESSAGES, max_tokens=10, temperature=0.9, **FREE, **kwargs
        )
        return [choice.message.content for choice in answer.choices]

    together = ask(n=3, seed=5)
    assert together == [ask(seed=seed)[0] for seed in (5, 6, 7)]
    assert len(set(together)) == 3


def test_unseeded_choices_differ(client: openai.OpenAI, live: ServerProcess) -> None:
    answer = client.chat.completions.create(model=live.model, messages=MESSAGES, max_tokens=12, n=4, **FREE)
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_stop_string_is_honoured_and_left_out(client: openai.OpenAI, live: ServerProcess) -> None:
    def ask(**kwargs: Any) -> Any:
        return client.chat.completions.create(
            model=live.model, messages=MESSAGES, temperature=0.8, seed=3, max_tokens=30, **FREE, **kwargs
        ).choices[0]

    free = ask().message.content
    stopped = ask(stop=free[5:7])
    assert stopped.message.content == free[: free.index(free[5:7])]
    assert stopped.finish_reason == "stop"


def test_json_schema(client: openai.OpenAI, live: ServerProcess) -> None:
    class Weather(BaseModel):
        city: str
        days: int

    answer = client.chat.completions.create(
        model=live.model,
        messages=MESSAGES,
        max_tokens=300,
        seed=1,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "strict": True, "schema": WEATHER},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    Weather.model_validate_json(answer.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        ({"guided_regex": "(ab){2,4}"}, {"abab", "ababab", "abababab"}),
        ({"guided_choice": ["yes", "no.", "may be\n"]}, {"yes", "no.", "may be\n"}),
        ({"structured_outputs": {"grammar": 'start: "x" | "yz"'}}, {"x", "yz"}),
    ],
)
def test_other_forms(client: openai.OpenAI, live: ServerProcess, body: Any, allowed: set[str]) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model=live.model, messages=MESSAGES, max_tokens=40, seed=seed, extra_body=body
        )
        assert answer.choices[0].message.content in allowed


def test_forced_tool_call(client: openai.OpenAI, live: ServerProcess) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    ask: dict[str, Any] = {
        "model": live.model,
        "messages": MESSAGES,
        "tools": tools,
        "tool_choice": choice,
        "max_tokens": 400,
        "seed": 2,
    }
    answer = client.chat.completions.create(**ask)
    assert answer.choices[0].finish_reason == "tool_calls"
    calls: Any = answer.choices[0].message.tool_calls
    assert calls[0].function.name == "weather"
    assert set(json.loads(calls[0].function.arguments)) == {"city", "days"}

    fragments = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            fragments.append(call.function.arguments or "")
    assert json.loads("".join(fragments)) == json.loads(calls[0].function.arguments)


def test_prediction_is_used_and_changes_nothing(client: openai.OpenAI, live: ServerProcess) -> None:
    ask: Any = {"model": live.model, "messages": MESSAGES, "temperature": 0.0, "max_tokens": 24, **FREE}
    plain = client.chat.completions.create(**ask)
    text = plain.choices[0].message.content
    ask["extra_body"] = {**FREE["extra_body"], "draft_depth": 8}  # not only where that pays on this machine
    guessed = client.chat.completions.create(**ask, prediction={"type": "content", "content": text})
    assert guessed.choices[0].message.content == text
    assert guessed.usage is not None
    assert guessed.usage.completion_tokens_details is not None
    assert (guessed.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 8


# -- OpenAI: completions, responses, models --------------------------------------------------------------


def test_completions_of_text_and_ids(client: openai.OpenAI, live: ServerProcess) -> None:
    several = client.completions.create(
        model=live.model, prompt=["ab", "ba", "ab"], **GREEDY, **FREE, echo=True
    )
    texts = [choice.text for choice in several.choices]
    assert texts[0] == texts[2]
    assert [text[:2] for text in texts] == ["ab", "ba", "ab"]
    ids = client.completions.create(model=live.model, prompt=[[10, 11], [12]], **GREEDY, logprobs=2, **FREE)
    assert len(ids.choices) == 2
    assert ids.choices[0].logprobs is not None
    assert len(ids.choices[0].logprobs.tokens or []) == 12


def test_responses_remember(client: openai.OpenAI, live: ServerProcess) -> None:
    first = client.responses.create(
        model=live.model, input="Hi", temperature=0, max_output_tokens=10, instructions="Be brief."
    )
    assert first.output_text
    second = client.responses.create(
        model=live.model, input="And?", previous_response_id=first.id, temperature=0, max_output_tokens=10
    )
    assert second.usage is not None
    by_hand = client.responses.create(
        model=live.model,
        input=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And?"},
        ],
        temperature=0,
        max_output_tokens=10,
        store=False,
    )
    assert second.output_text == by_hand.output_text
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_response_stream_helper(client: openai.OpenAI, live: ServerProcess) -> None:
    class Weather(BaseModel):
        city: str
        days: int

    with client.responses.stream(
        model=live.model,
        input="Weather?",
        max_output_tokens=400,
        extra_body={"seed": 1, "guided_json": None},
        text_format=Weather,
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.status in ("completed", "incomplete")


def test_response_with_a_forced_call(client: openai.OpenAI, live: ServerProcess) -> None:
    made = client.responses.create(
        model=live.model,
        input="Weather?",
        tools=[{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=400,
        extra_body={"seed": 4},
    )
    calls = [item for item in made.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["weather"]
    after = client.responses.create(
        model=live.model,
        previous_response_id=made.id,
        input=[{"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"}],
        max_output_tokens=5,
    )
    assert after.status in ("completed", "incomplete")


def test_models(client: openai.OpenAI, claude: anthropic.Anthropic, live: ServerProcess) -> None:
    assert [model.id for model in client.models.list()] == [live.model]
    assert client.models.retrieve(live.model).id == live.model
    (listed,) = claude.models.list()
    assert claude.models.retrieve(live.model) == listed
    assert (listed.id, listed.display_name, listed.type) == (live.model, live.model, "model")
    assert (listed.max_input_tokens, listed.max_tokens, listed.lifecycle) == (CONTEXT, CONTEXT, "active")
    assert listed.created_at.year >= 2026


def test_errors_have_the_clients_own_types(client: openai.OpenAI, live: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=live.model, messages=MESSAGES, functions=[{"name": "f"}])
    assert caught.value.param == "functions"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=live.model, input="x")


# -- Anthropic -------------------------------------------------------------------------------------------


def test_message(claude: anthropic.Anthropic, live: ServerProcess) -> None:
    ask: Any = {
        "model": live.model,
        "max_tokens": 12,
        "messages": MESSAGES,
        "extra_body": {"ignore_eos": True, "temperature": 0},
    }
    message = claude.messages.create(**ask)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 12
    assert message.content[0].type == "text"
    with claude.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == message.content[0].text
    assert final.usage.output_tokens == 12
    counted = claude.messages.count_tokens(model=live.model, messages=MESSAGES)
    for usage in (message.usage, final.usage):  # the cached part of a prompt is counted apart
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert final.usage.cache_read_input_tokens, "the same prompt a moment ago"


def test_tool_using_conversation(claude: anthropic.Anthropic, live: ServerProcess) -> None:
    """As coding tools hold it: system blocks with cache marks, a streamed call, its result, the answer."""
    tools: Any = [{"name": "weather", "description": "Looks outside", "input_schema": WEATHER}]
    ask: Any = {
        "model": live.model,
        "max_tokens": 400,
        "system": [
            {"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Use tools."},
        ],
        "tools": tools,
        "metadata": {"user_id": "u"},
        "extra_headers": {"anthropic-beta": "some-beta-2025-01-01"},
        "extra_query": {"beta": "true"},
        "extra_body": {"seed": 3},
    }
    with claude.messages.stream(
        messages=MESSAGES, tool_choice={"type": "tool", "name": "weather"}, **ask
    ) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    assert set(call.input) == {"city", "days"}  # type: ignore[arg-type]
    ask["max_tokens"] = 10
    second = claude.messages.create(
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": first.content},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": call.id,
                        "content": [{"type": "text", "text": "rain"}],
                    },
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        **ask,
    )
    assert second.stop_reason in ("max_tokens", "end_turn", "tool_use")


def test_prefill_is_continued(claude: anthropic.Anthropic, live: ServerProcess) -> None:
    message = claude.messages.create(
        model=live.model,
        max_tokens=5,
        messages=[*MESSAGES, {"role": "assistant", "content": "Once"}],
        extra_body={"ignore_eos": True},
    )
    assert message.usage.output_tokens == 5


def test_anthropic_errors_have_the_clients_own_types(
    claude: anthropic.Anthropic, live: ServerProcess
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", max_tokens=5, messages=MESSAGES)
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        claude.messages.create(
            model=live.model,
            max_tokens=5,
            messages=MESSAGES,
            tools=[{"type": "web_search_20250305", "name": "web_search"}],
            tool_choice={"type": "tool", "name": "web_search"},
        )


# -- bad input -------------------------------------------------------------------------------------------

CYCLIC = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
PICTURE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "prompt of 100k tokens": ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "context holds"),
    "picture to a text model": ({"messages": [{"role": "user", "content": PICTURE}]}, "text only"),
    "negative n": ({"n": -1}, "n: "),
    "cyclic schema": ({"guided_json": CYCLIC}, "json_schema"),
    "schema that is none": ({"guided_json": "{"}, "json_schema"),
    "unsupported grammar": ({"guided_grammar": "start: %foo"}, "lark"),
    "bad regex": ({"guided_regex": "(["}, "regex"),
    "token outside the vocabulary": ({"logit_bias": {"999999": 1}}, "vocabulary"),
    "template variable that is ours": ({"chat_template_kwargs": {"messages": []}}, "messages"),
    "reserved depth": ({"draft_depth": 99}, "draft_depth"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_the_server_serves_on(live: ServerProcess, case: str) -> None:
    body, words = BAD[case]
    for stream in (False, True):
        response = live.post("/v1/chat/completions", {"messages": MESSAGES, "stream": stream} | body)
        assert response.status_code == 400, response.text
        assert words in response.json()["error"]["message"]
    assert live.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}).status_code == 200


def test_token_ids_outside_the_vocabulary_are_refused(live: ServerProcess) -> None:
    for prompt in ([10**9], [-1], []):
        assert live.post("/v1/completions", {"prompt": prompt}).status_code == 400


# -- under load ------------------------------------------------------------------------------------------

ABANDONED = 'outrider_requests_total{{api="{}",finish="abandoned"}}'
LONG = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True, "messages": MESSAGES, "stream": True}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_client_that_leaves_frees_its_row(live: ServerProcess, path: str) -> None:
    abandoned = (
        f'outrider_requests_total{{api="{path.removeprefix("/v1/").split("/")[0]}",finish="abandoned"}}'
    )
    before = live.metric(abandoned)
    with httpx.stream("POST", live.url + path, json=LONG, timeout=PATIENCE_S) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(8):
            next(lines)
        assert live.get("/v1/status")["live_requests"] == 1
        assert live.get("/v1/status")["rows"]
    status = live.wait_until_idle()
    assert live.metric(abandoned) == before + 1, "the answer was given to the end"
    assert status["rows"] == []
    assert status["cache_bytes"] == 0


def test_whole_answer_is_given_up_when_its_client_leaves(live: ServerProcess) -> None:
    abandoned = ABANDONED.format("chat")
    before = live.metric(abandoned)

    def was_given_up() -> bool:
        """False if the client left before its prompt was prepared: then there was no answer yet."""
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{live.url}/v1/chat/completions",
                json=LONG | {"stream": False},
                timeout=httpx.Timeout(PATIENCE_S, read=0.3),
            )
        live.wait_until_idle()
        return live.metric(abandoned) > before

    wait_until(was_given_up)


def _waits_for_health_during_a_long_prefill(live: ServerProcess) -> tuple[list[float], float]:
    """How long each answer took, and how long the prefill took."""
    body = {"prompt": "word " * 600, "max_tokens": 1, "temperature": 0}

    async def run() -> tuple[list[float], float]:
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as http:
            await http.get("/health")  # the connection is there
            started = time.perf_counter()
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            waits = []
            while not asking.done():
                before = time.perf_counter()
                assert (await http.get("/health")).status_code == 200
                waits.append(time.perf_counter() - before)
                await asyncio.sleep(0.005)
            assert asking.result().status_code == 200
            return waits, time.perf_counter() - started

    return asyncio.run(run())


def test_health_answers_during_a_long_prefill(live: ServerProcess) -> None:
    waits, _ = _waits_for_health_during_a_long_prefill(live)
    assert len(waits) >= 5


@measures_time
def test_health_answers_at_once_during_a_long_prefill(live: ServerProcess) -> None:
    waits, took_s = _waits_for_health_during_a_long_prefill(live)
    assert took_s > 0.2, "the prompt is too short to show anything"
    assert sorted(waits)[len(waits) * 9 // 10] < 0.05
    assert max(waits) < 0.25  # one slip of a busy machine, but no forward pass


def _bodies() -> list[dict[str, Any]]:
    """Plain, speculating, sampled and constrained."""
    free = {"max_tokens": 24, "ignore_eos": True}
    schema = {"max_tokens": 60, "guided_json": WEATHER}
    return [
        {"prompt": "a", **free, "temperature": 0, "draft_depth": 0},
        {"prompt": "b", **free, "temperature": 0, "draft_depth": 3},
        {"prompt": "c", **free, "temperature": 0.8, "seed": 1, "draft_depth": 0},
        {"prompt": "d", **free, "temperature": 0.8, "seed": 2},
        {"prompt": "e", **schema, "temperature": 0.8, "seed": 3},
        {"prompt": "f", **schema, "temperature": 0, "draft_depth": 1},
        {"prompt": "g", **free, "temperature": 0.8, "seed": 4, "draft_depth": 8},
        {"prompt": "h", **free, "temperature": 0, "presence_penalty": 1.0},
    ]


def test_mixed_load_gives_everyone_their_solo_answer(live: ServerProcess) -> None:
    alone = [live.post("/v1/completions", body).json()["choices"][0]["text"] for body in _bodies()]
    mixed_before = live.metric('outrider_steps_total{rows="plain_and_speculating"}')

    async def read(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        text = ""
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def leave(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/chat/completions", json=LONG) as response:
            async for _ in response.aiter_lines():
                break

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as http:
            leavers = [asyncio.create_task(leave(http)) for _ in range(4)]
            texts = await asyncio.gather(*(read(http, body) for body in _bodies()))
            await asyncio.gather(*leavers)
            return texts

    assert asyncio.run(run()) == alone
    assert live.metric('outrider_steps_total{rows="plain_and_speculating"}') > mixed_before
    status = live.wait_until_idle()
    assert (status["rows"], status["cache_bytes"], status["requests"]) == ([], 0, [])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}])
def test_depth_and_neighbours_do_not_change_the_answer(
    client: openai.OpenAI, live: ServerProcess, sampling: dict[str, Any]
) -> None:
    async def ask(http: openai.AsyncOpenAI, depth: Any, text: str) -> str | None:
        answer = await http.chat.completions.create(
            model=live.model,
            messages=[{"role": "user", "content": text}],
            max_tokens=20,
            extra_body={"ignore_eos": True, "draft_depth": depth} | sampling,
        )
        return answer.choices[0].message.content

    async def run() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as http:
            alone = [await ask(http, depth, "me") for depth in (0, "auto", 4)]
            neighbours = [ask(http, i % 4, f"neighbour {i}") for i in range(7)]
            among, *_ = await asyncio.gather(ask(http, "auto", "me"), *neighbours)
            return [*alone, among]

    assert len(set(asyncio.run(run()))) == 1
