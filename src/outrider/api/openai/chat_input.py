"""OpenAI's chat request in canonical form. What cannot be honoured is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.api.errors import invalid, refused
from outrider.api.openai import chat_schema as schema
from outrider.api.params import check_stop, format_grammar, grammar_of, sampling_params, template_kwargs
from outrider.chat.conversation import (
    ChatRequest,
    MediaPart,
    Message,
    NamedTool,
    Part,
    Role,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from outrider.request import Grammar


def chat_request(body: schema.ChatCompletionRequest, default_max_tokens: int | None) -> ChatRequest:
    _check_options(body)
    tools = [_tool(i, tool) for i, tool in enumerate(body.tools or ())]
    tools, choice = _choose(tools, body.tool_choice)
    params = sampling_params(
        body,
        max_tokens=_max_tokens(body, default_max_tokens),
        stop=body.stop,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    return ChatRequest(
        messages=[_message(i, message) for i, message in enumerate(body.messages)],
        params=params,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        grammar=grammar_of(body, ("response_format", _format(body.response_format))),
        prediction=None if body.prediction is None else _text(body.prediction.content),
        template_kwargs=template_kwargs(body, body.reasoning_effort),
    )


def _check_options(body: schema.ChatCompletionRequest) -> None:
    check_stop(body.stop)
    check_stream_options(body.stream_options, body.stream)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    if body.modalities not in (None, ["text"]):
        raise refused("modalities", "this server answers in text only")
    check_verbosity("verbosity", body.verbosity)


def check_verbosity(param: str, verbosity: str | None) -> None:
    if verbosity not in (None, "medium"):
        raise refused(param, "models here have no such setting: say it in the prompt")


def check_stream_options(options: Any, stream: bool | None) -> None:
    if options is None:
        return
    if not stream:
        raise invalid("stream_options", "only with stream: true")
    if options.include_obfuscation:
        raise refused("stream_options.include_obfuscation", "chunks are not padded here")


def _max_tokens(body: schema.ChatCompletionRequest, default: int | None) -> int | None:
    given = {value for value in (body.max_tokens, body.max_completion_tokens) if value is not None}
    if len(given) > 1:
        raise invalid("max_completion_tokens", "differs from max_tokens, which is its old name: give one")
    return given.pop() if given else default


def _format(response_format: schema.ResponseFormat | None) -> Grammar | None:
    if response_format is None:
        return None
    inner = response_format.json_schema
    schema_ = inner.schema_ if inner else None
    return format_grammar("response_format", response_format.type, schema_, where="json_schema.schema")


# -- tools -----------------------------------------------------------------------------------------------


def _tool(index: int, tool: schema.ToolSpec) -> Tool:
    if tool.type != "function":
        raise refused(f"tools[{index}]", f"tools of type {tool.type!r} are not supported, only functions")
    if tool.function is None:
        raise invalid(f"tools[{index}].function", "is missing")
    function = tool.function
    return Tool(
        function.name, function.description or "", function.parameters or {}, strict=bool(function.strict)
    )


def _choose(tools: list[Tool], choice: str | schema.ToolChoiceObject | None) -> tuple[list[Tool], ToolChoice]:
    if isinstance(choice, schema.ToolChoiceObject):
        if choice.type == "function" and choice.function is not None:
            return tools, named_tool(tools, choice.function.name)
        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            names = [(tool.get("function") or {}).get("name") for tool in choice.allowed_tools.tools]
            return allowed_tools(tools, names, choice.allowed_tools.mode)
        raise refused("tool_choice", f"choices of type {choice.type!r} are not supported")
    return tools, plain_choice(tools, choice)


def plain_choice(tools: Sequence[Tool], choice: str | None) -> ToolChoice:
    check_names(tools)
    if choice == "required":
        if not tools:
            raise invalid("tool_choice", "'required' needs tools to choose from")
        return "required"
    return "none" if choice == "none" else "auto"


def named_tool(tools: Sequence[Tool], name: str) -> NamedTool:
    check_names(tools)
    if name not in {tool.name for tool in tools}:
        raise invalid("tool_choice", f"names {name!r}, which is not among the tools")
    return NamedTool(name)


def allowed_tools(tools: Sequence[Tool], names: Sequence[Any], mode: str) -> tuple[list[Tool], ToolChoice]:
    """Only these may be called: the model sees no others."""
    for name in names:
        if name not in {tool.name for tool in tools}:
            raise invalid("tool_choice", f"allows {name!r}, which is not among the tools")
    return (kept := [tool for tool in tools if tool.name in names]), plain_choice(kept, mode)


def check_names(tools: Sequence[Tool]) -> None:
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or "" in names:
        raise invalid("tools", f"{twice[0]!r} is there twice" if twice else "a tool has no name")


# -- messages --------------------------------------------------------------------------------------------


def _message(index: int, message: schema.ChatMessage) -> Message:
    if isinstance(message, schema.AssistantMessage):
        return _assistant(index, message)
    if isinstance(message, schema.ToolMessage):
        content = _parts(message.content)
        return Message("tool", content, tool_call_id=message.tool_call_id, name=message.name)
    role: Role = "system" if isinstance(message, schema.SystemMessage) else "user"
    return Message(role, _parts(message.content), name=message.name)


def _assistant(index: int, message: schema.AssistantMessage) -> Message:
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise refused(f"messages[{index}].{name}", "not supported")
    calls = [
        ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    content = _parts(message.content or "")
    if message.refusal and not content:
        content = (TextPart(message.refusal),)
    reasoning = message.reasoning_content or message.reasoning
    return Message("assistant", content, reasoning=reasoning, tool_calls=tuple(calls), name=message.name)


def _parts(content: str | Sequence[Any]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    return tuple(_part(part) for part in content)


def _part(part: Any) -> Part:
    match part:
        case schema.TextPart():
            return TextPart(part.text)
        case schema.RefusalPart():
            return TextPart(part.refusal)
        case schema.ImagePart():
            return MediaPart("image", part.image_url.url)
        case schema.VideoPart():
            return MediaPart("video", part.video_url.url)
        case _:
            sound = part.input_audio
            return MediaPart("audio", f"data:audio/{sound.format};base64,{sound.data}")


def _text(content: str | Sequence[schema.TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
