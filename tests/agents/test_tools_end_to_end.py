"""Tools as agents send them, good and bad, end to end: the official SDKs over HTTP in all three APIs.

The server is real; only its model plays a script, under the grammars that the server makes of the tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from script import Call, Scene, Turn
from sdk_clients import APIS, Api, Refused, Tool, openai_sdk
from workplace import AgentServer

from patience import in_test_or_soak

KNOCK = [("user", "Knock, knock")]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "is_brief": {"type": "boolean"}},
    "required": ["city", "is_brief"],
}
CLOCK = Tool("clock", {"type": "object", "properties": {}})
LOOK = Tool("look", WEATHER)
# Not a regular expression: no grammar can be made of it.
BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(unclosed"}}}

whole_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(params=list(APIS))
def api(request: pytest.FixtureRequest, agent_server: AgentServer) -> Iterator[Api]:
    agent_server.forget_off_script()
    yield APIS[request.param](agent_server)
    agent_server.forget_off_script()  # other files share the server


def says(server: AgentServer, *turns: Turn, when: str = "Knock, knock") -> None:
    server.play(Scene([when], turns))


# -- bad input -------------------------------------------------------------------------------------------


@whole_and_streamed
def test_a_schema_that_does_not_compile_leaves_the_tools_usable(
    api: Api, stream: bool, agent_server: AgentServer
) -> None:
    says(agent_server, Turn("I look.", [Call("bad", {"a": "x"})]))
    answer = api.ask(KNOCK, [Tool("bad", BAD_SCHEMA), LOOK], stream=stream)
    assert answer.calls == [("bad", {"a": "x"})]
    assert agent_server.off_script() == ""


@whole_and_streamed
@pytest.mark.parametrize("strict", [None, True])
def test_a_schema_that_does_not_compile_and_is_insisted_on_is_refused(
    api: Api, stream: bool, strict: bool | None
) -> None:
    choice = "auto" if strict else "required"
    with pytest.raises(Refused, match=r"grammar cannot be used.*") as caught:
        api.ask(KNOCK, [Tool("bad", BAD_SCHEMA, strict), LOOK], choice, stream)
    assert caught.value.kind == "invalid_request_error"
    assert "strict: true" in str(caught.value) or not strict


def test_each_of_500_tools_has_a_grammar(api: Api, agent_server: AgentServer) -> None:
    """The script's call has an undeclared argument: the grammar of the last tool does not let it pass."""
    tools = [Tool(f"tool_{i}", WEATHER) for i in range(500)]
    says(agent_server, Turn("", [Call("tool_499", {"city": "Oslo", "surprise": 1})]))
    answer = api.ask(KNOCK, tools, stream=True)
    ((name, arguments),) = answer.calls
    assert name == "tool_499"
    assert arguments.keys() == {"city", "is_brief"}
    assert arguments["city"] == "Oslo"
    assert "surprise" not in str(arguments)


@whole_and_streamed
def test_two_tools_of_one_name_are_refused_by_their_name(api: Api, stream: bool) -> None:
    with pytest.raises(Refused, match="'look' is used twice") as caught:
        api.ask(KNOCK, [LOOK, CLOCK, LOOK], stream=stream)
    assert caught.value.kind == "invalid_request_error"


@whole_and_streamed
def test_a_result_without_a_call_is_read(api: Api, stream: bool, agent_server: AgentServer) -> None:
    agent_server.play(Scene(["Nobody asked for this"], [Turn("I see.")]))
    answer = api.ask([*KNOCK, ("result", "Nobody asked for this")], [CLOCK], stream=stream)
    assert answer.text == "I see."


@whole_and_streamed
def test_an_earlier_call_of_a_tool_that_is_gone_is_read(
    api: Api, stream: bool, agent_server: AgentServer
) -> None:
    agent_server.play(Scene(["long_gone", "It was there once"], [Turn("I remember.")]))
    said = [*KNOCK, ("call", "long_gone", {"x": 1}), ("result", "It was there once")]
    assert api.ask(said, [CLOCK], stream=stream).text == "I remember."


@whole_and_streamed
def test_the_model_cannot_call_a_tool_that_does_not_exist(
    api: Api, stream: bool, agent_server: AgentServer
) -> None:
    says(agent_server, Turn("", [Call("nobody", {})]))
    assert api.ask(KNOCK, [CLOCK], stream=stream).calls == [("clock", {})]
    assert "the grammar forbids what follows" in agent_server.off_script()


@whole_and_streamed
def test_a_tool_that_does_not_exist_cannot_be_demanded(api: Api, stream: bool) -> None:
    with pytest.raises(Refused, match="'nobody', which is not among the tools") as caught:
        api.ask(KNOCK, [CLOCK], "nobody", stream)
    assert caught.value.kind == "invalid_request_error"


# -- calls -----------------------------------------------------------------------------------------------


@whole_and_streamed
def test_parallel_calls_with_empty_and_odd_arguments(
    api: Api, stream: bool, agent_server: AgentServer
) -> None:
    odd = {"city": 'é😀 \\ "quoted" </tool_call> {[', "is_brief": False}
    says(agent_server, Turn("Both.", [Call("clock", {}), Call("look", odd)]))
    answer = api.ask(KNOCK, [CLOCK, LOOK], stream=stream)
    assert answer.text.strip() == "Both."
    assert answer.calls == [("clock", {}), ("look", odd)]
    assert agent_server.off_script() == ""


def test_large_arguments_arrive_whole(api: Api, agent_server: AgentServer) -> None:
    line = 'print("é😀 \\\\")  # </tool>\n'
    large = {"city": line * in_test_or_soak(12, 2_000), "is_brief": True}
    says(agent_server, Turn("", [Call("look", large)]))
    assert api.ask(KNOCK, [LOOK], stream=True).calls == [("look", large)]
    assert agent_server.off_script() == ""


def test_a_call_that_is_mentioned_in_reasoning_is_not_made(api: Api, agent_server: AgentServer) -> None:
    thought = 'I could write <tool_call>\n{"name": "look"} here.'
    says(agent_server, Turn("", [Call("clock", {})], thought))
    answer = api.ask(KNOCK, [CLOCK, LOOK], stream=True)
    assert answer.calls == [("clock", {})]
    assert answer.reasoning.strip() == thought
    assert agent_server.off_script() == ""


@pytest.mark.parametrize("strict", [None, False])
def test_strict_false_leaves_the_arguments_free(
    api: Api, strict: bool | None, agent_server: AgentServer
) -> None:
    schema = {"type": "object", "properties": {"is_on": {"type": "boolean"}}, "required": ["is_on"]}
    free: dict[str, Any] = {"else": [1, {"b": None}]}
    says(agent_server, Turn("", [Call("switch", free)]))
    ((name, arguments),) = api.ask(KNOCK, [CLOCK, Tool("switch", schema, strict)]).calls
    assert name == "switch"
    assert arguments == free if strict is False else arguments.keys() == {"is_on"}
    assert (agent_server.off_script() == "") == (strict is False)


def test_a_function_of_a_namespace_is_called_by_its_two_names(agent_server: AgentServer) -> None:
    """As Codex sends the tools of MCP servers, and sends back the calls."""
    function = {"type": "function", "name": "read", "description": "Reads.", "parameters": WEATHER}
    files = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [function]}
    call = Call("mcp__files__read", {"city": "Oslo", "is_brief": True})
    says(agent_server, Turn("", [call]), Turn("Done."))
    responses, said = openai_sdk(agent_server).responses, [{"role": "user", "content": "Knock, knock"}]
    body: Any = {"model": agent_server.process.model, "tools": [files]}
    with responses.stream(input=said, **body) as stream:
        (made,) = stream.get_final_response().output
    assert (made.type, made.namespace, made.name) == ("function_call", "mcp__files", "read")
    result = {"type": "function_call_output", "call_id": made.call_id, "output": "rain"}
    sent_back = made.model_dump(exclude={"parsed_arguments"}, exclude_none=True)
    assert responses.create(input=[*said, sent_back, result], **body).output_text == "Done."
    assert agent_server.off_script() == ""


@pytest.mark.parametrize("choice", ["auto", "required", "look"])
def test_counted_tokens_are_those_of_the_usage(api: Api, choice: str, agent_server: AgentServer) -> None:
    says(agent_server, Turn("", [Call("look", {"city": "Oslo", "is_brief": True})]))
    said = [*KNOCK, ("call", "clock", {}), ("result", "noon"), *KNOCK]
    counted = api.count(said, [CLOCK, LOOK], choice)
    if counted is not None:  # chat completions have no such route
        assert counted == api.ask(said, [CLOCK, LOOK], choice).num_prompt
