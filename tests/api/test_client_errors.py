"""Errors, and ends of streams, in the shape on which clients act: the official SDKs and coding agents."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import anthropic
import httpx2  # the HTTP client of both SDKs
import openai
import pytest
from fake_backend import CALLS, CUT, HELLO, USER, Client, FakeBackend, server

from outrider.api.app import Server
from outrider.request import PromptTooLong

CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
LITELLM = "this model's maximum context length is"  # in the message, in lower case
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
TOO_LONG = PromptTooLong("the prompt has 300 tokens and the context holds 256: shorten it", "300 tokens", 256)


def connected(made: Server) -> httpx2.AsyncClient:
    """An HTTP client for an SDK, connected to a server in this process."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(made.app), base_url="http://test")


def openai_sdk(made: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", max_retries=0, http_client=connected(made)
    )


def anthropic_sdk(made: Server) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url="http://test", api_key="none", max_retries=0, http_client=connected(made)
    )


def refused(path: str, failure: Exception = TOO_LONG, **fields: Any) -> dict[str, Any]:
    response = Client(server(FakeBackend(failure=failure))).post(path, BODIES[path] | fields)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


# -- a prompt that is too long ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_openais_clients_recognise_a_prompt_that_is_too_long(path: str, stream: bool) -> None:
    error = refused(path, stream=stream)
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert LITELLM in error["message"].lower()
    assert "256 tokens. The prompt has 300 tokens" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_claude_code_recognises_a_prompt_that_is_too_long(stream: bool) -> None:
    error = refused("/v1/messages", stream=stream)
    assert error == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 300 tokens > 255 maximum",
    }


@pytest.mark.parametrize("size", ["300 tokens", "about 20000 tokens", "more than 514 tokens"])
def test_claude_code_reads_the_numbers_also_if_they_are_estimates(size: str) -> None:
    found = CLAUDE_CODE.search(refused("/v1/messages", PromptTooLong("x", size, 256))["message"])
    assert found is not None
    assert found.groups() == (re.sub(r"\D", "", size), "255")


def test_a_response_that_is_too_long_is_a_400_or_a_failed_stream() -> None:
    """Codex finds the error in the stream's event only."""
    assert refused("/v1/responses")["code"] == "context_length_exceeded"
    response = Client(server(FakeBackend(failure=TOO_LONG))).post(
        "/v1/responses", {"input": "Hi", "stream": True}
    )
    assert response.status_code == 200
    events = [json.loads(data) for data in re.findall(r"^data: (.+)$", response.text, re.MULTILINE)]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]
    last = events[-1]["response"]
    assert last["status"] == "failed"
    assert last["error"]["code"] == "context_length_exceeded"
    assert LITELLM in last["error"]["message"].lower()


# -- a response that is cut off --------------------------------------------------------------------------


def test_openais_sdk_gets_the_final_response_of_a_cut_off_stream() -> None:
    async def read() -> Any:
        sdk = openai_sdk(server(FakeBackend(CUT)))
        async with sdk.responses.stream(model="tiny", input="Hi", max_output_tokens=5) as stream:
            return await stream.get_final_response()

    final = asyncio.run(read())
    assert (final.status, final.output_text) == ("incomplete", "Hel")
    assert final.incomplete_details.reason == "max_output_tokens"


# -- threads of Anthropic's SDK --------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_thread_is_refused_with_the_details_on_which_the_sdk_sends_all_messages(path: str) -> None:
    body = {"messages": USER, "max_tokens": 9, "thread": {"type": "continue", "previous_message_id": "m"}}
    response = Client(server(FakeBackend())).post(path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "Send the whole conversation" in error["message"]


def test_the_tool_runner_keeps_its_conversation() -> None:
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "rain"

    @anthropic.beta_async_tool
    async def time() -> str:
        """The time of day."""
        return "noon"

    backend = FakeBackend(answer=lambda request: HELLO if len(request.messages) > 1 else CALLS)

    async def run() -> Any:
        runner = anthropic_sdk(server(backend)).beta.messages.tool_runner(
            model="tiny", max_tokens=99, tools=[weather, time], messages=[{"role": "user", "content": "Hi"}]
        )
        return await runner.until_done()

    final = asyncio.run(run())
    assert asked == ["Oslo"]
    assert final.content[0].text == "Hello wörld"
    roles = [message.role for message in backend.requests[-1].messages]
    assert roles == ["user", "assistant", "tool", "tool"]


# -- tools that cannot be called here --------------------------------------------------------------------

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
FOREIGN_TOOLS: dict[str, list[dict[str, Any]]] = {  # one that can be called, and others
    "/v1/chat/completions": [
        {"type": "custom", "custom": {"name": "x"}},
        {"type": "function", "function": FUNCTION},
    ],
    "/v1/responses": [
        {"type": "mcp", "server_label": "x"},
        {"type": "web_search"},
        {"type": "function", **FUNCTION},
    ],
    "/v1/messages": [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"name": "f", "input_schema": {"type": "object"}},
    ],
}


@pytest.mark.parametrize("path", FOREIGN_TOOLS)
def test_tools_that_cannot_be_called_are_left_out_with_a_line_in_the_log(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    backend = FakeBackend()
    response = Client(server(backend)).post(path, BODIES[path] | {"tools": FOREIGN_TOOLS[path]})
    assert response.status_code == 200, response.text
    assert [tool.name for tool in backend.requests[0].tools] == ["f"]
    types = sorted(tool["type"] for tool in FOREIGN_TOOLS[path][:-1])
    assert f"tools left out, which cannot be called here: {', '.join(types)}" in caplog.text


def test_allowed_tools_that_cannot_be_called_are_left_out() -> None:
    backend = FakeBackend()
    allowed = [{"type": "web_search"}, {"type": "function", "name": "f"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    body = {"input": "Hi", "tools": FOREIGN_TOOLS["/v1/responses"], "tool_choice": choice}
    assert Client(server(backend)).post("/v1/responses", body).status_code == 200
    assert [tool.name for tool in backend.requests[0].tools] == ["f"]


# -- servers that take nobody ------------------------------------------------------------------------------


def refusals(made: Server) -> tuple[openai.APIStatusError, anthropic.APIStatusError]:
    """What the two SDKs raise."""

    async def ask() -> tuple[Any, Any]:
        with pytest.raises(openai.APIStatusError) as first:
            await openai_sdk(made).responses.create(model="tiny", input="Hi", stream=True)
        messages: Any = USER
        with pytest.raises(anthropic.APIStatusError) as second:
            await anthropic_sdk(made).messages.create(
                model="tiny", messages=messages, max_tokens=9, stream=True
            )
        return first.value, second.value

    return asyncio.run(ask())


def test_a_wrong_key_is_the_sdks_authentication_error() -> None:
    one, other = refusals(server(FakeBackend(), api_key="secret"))
    assert isinstance(one, openai.AuthenticationError)
    assert isinstance(other, anthropic.AuthenticationError)
    assert (one.code, other.type) == ("invalid_api_key", "authentication_error")


def test_a_full_server_is_the_sdks_rate_limit_error_with_a_time_to_come_back() -> None:
    made = server(FakeBackend(), max_rows=1, max_queue=1)
    made.context.live.admission.open("other").add(num_requests=1)
    one, other = refusals(made)
    assert isinstance(one, openai.RateLimitError)
    assert isinstance(other, anthropic.RateLimitError)
    assert (one.type, other.type) == ("rate_limit_error", "rate_limit_error")
    assert one.response.headers["retry-after"] == other.response.headers["retry-after"] == "2"


def test_a_server_that_shuts_down_is_the_sdks_overload() -> None:
    made = server(FakeBackend())
    made.context.live.drain()
    one, other = refusals(made)
    assert isinstance(one, openai.InternalServerError)
    assert isinstance(other, anthropic.InternalServerError)
    assert (one.status_code, other.status_code, other.type) == (503, 503, "overloaded_error")
    assert one.response.headers["retry-after"]


# -- betas -----------------------------------------------------------------------------------------------


def test_unknown_betas_are_tolerated() -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "never-heard-of-2031-01-01,other"}
    response = Client(server(FakeBackend()), **headers).post("/v1/messages?beta=true", BODIES["/v1/messages"])
    assert response.status_code == 200


# -- names of the model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
def test_any_model_name_is_served_if_the_operator_allows_it(path: str) -> None:
    body = BODIES[path] | {"model": "claude-opus-4"}
    assert Client(server(FakeBackend())).post(path, body).status_code == 404
    answer = Client(server(FakeBackend(), any_model_name=True)).post(path, body)
    assert (answer.status_code, answer.json()["model"]) == (200, "claude-opus-4")


def test_a_model_of_any_name_is_found_but_not_listed() -> None:
    client = Client(server(FakeBackend(), any_model_name=True))
    assert client.get("/v1/models/gpt-5").json()["id"] == "gpt-5"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny", "other"]
