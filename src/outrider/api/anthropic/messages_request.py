"""POST /v1/messages and /v1/messages/count_tokens: their JSON fields and the translation into a ChatRequest.

A field that Outrider cannot honour is an error that names the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from outrider.api.anthropic.content_blocks import (
    DocumentBlock,
    MediaBlock,
    TextBlock,
    part_of,
    text_parts,
)
from outrider.api.errors import invalid, refused
from outrider.api.limits import (
    MESSAGES,
    STOP_SEQUENCES,
    TOOLS,
    AnyText,
    AtMost,
    JsonObject,
    Name,
    Word,
    check_stops,
)
from outrider.api.request_fields import (
    ChatFields,
    RequestModel,
    Whole,
    documented,
    grammar_of,
    one_of_types,
    sampling_params,
    schema_grammar,
    template_kwargs,
)
from outrider.api.tool_fields import ToolName, callable_tools, named_tool, tool_choice_of, tool_of
from outrider.chat.conversation import (
    ChatRequest,
    Message,
    Part,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from outrider.chat.template import tool_dict
from outrider.request import NO_DEFAULTS, SamplingDefaults

ERROR_PREFIX = "Error: "  # the model reads it before the text of a tool_result with is_error
BILLING_HEADER = re.compile(r"\A(?:x-anthropic-[a-z-]+:[^\n]*\n?)+")
REFUSED_TOOL_FIELDS = {
    "input_examples": "not supported: put examples into the description",
    "allowed_callers": "not supported: only the model calls tools",
}


class ThinkingBlock(RequestModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(RequestModel):
    type: Literal["tool_use"]
    id: Word
    name: Name
    input: JsonObject


class ToolReferenceBlock(RequestModel):
    type: Literal["tool_reference"]
    tool_name: Name


ResultPart = Annotated[
    TextBlock | MediaBlock | DocumentBlock | ToolReferenceBlock, Field(discriminator="type")
]


class ToolResultBlock(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: Word
    content: str | Annotated[list[ResultPart], AtMost(MESSAGES)] | None = None
    is_error: bool | None = None


UserBlock = Annotated[TextBlock | MediaBlock | DocumentBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessageParam(RequestModel):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], AtMost(MESSAGES)]


class AssistantMessageParam(RequestModel):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], AtMost(MESSAGES)]


class SystemMessageParam(RequestModel):
    role: Literal["system"]
    content: str | Annotated[list[TextBlock], AtMost(MESSAGES)]


MessageParam = Annotated[
    UserMessageParam | AssistantMessageParam | SystemMessageParam, Field(discriminator="role")
]


class ToolParam(RequestModel):
    model_config = ConfigDict(json_schema_extra=tool_of(None, "custom", require="input_schema"))

    name: ToolName
    type: Word | None = Field(None, description="custom; tools of other types are left out")
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None
    defer_loading: bool | None = Field(
        None, description="The prompt shows the tool where a tool_reference names it, not at its beginning"
    )


class ToolChoiceParam(RequestModel):
    model_config = ConfigDict(json_schema_extra=one_of_types(auto=[], any=[], tool=["name"], none=[]))

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = documented(
        "Most tokens of thinking: at the limit its end is forced. Also for the chat template", minimum=0
    )
    display: Literal["summarized", "omitted", "updates"] | None = Field(
        None, description="omitted: the blocks are empty; else they have all that was thought"
    )


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Word | None = Field(
        None, description="For the chat template, or a limit of the thinking's tokens"
    )
    format: OutputFormat | None = None


class CountTokensRequest(ChatFields):
    model: Word | None = None
    messages: Annotated[list[MessageParam], AtMost(MESSAGES)] = Field(min_length=1)
    system: str | Annotated[list[TextBlock], AtMost(MESSAGES)] | None = None
    tools: Annotated[list[ToolParam], AtMost(TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None

    cache_control: JsonObject | None = Field(
        None, description="Caching is automatic; with this field, usage reports cache writes"
    )
    speed: Word | None = Field(None, description="No effect: there is one speed")
    user_profile_id: Word | None = Field(None, description="No effect")
    workspace_id: Word | None = Field(None, description="No effect")


class MessagesRequest(CountTokensRequest):
    max_tokens: Whole = Field(json_schema_extra={"minimum": 1})
    stream: bool | None = None
    stop_sequences: Annotated[list[AnyText], AtMost(STOP_SEQUENCES)] | None = None

    metadata: JsonObject | None = Field(None, description="No effect")
    service_tier: Word | None = Field(None, description="There is one tier: standard")
    inference_geo: Word | None = Field(None, description="No effect")
    diagnostics: JsonObject | None = Field(None, description="No effect")


# -- translation -----------------------------------------------------------------------------------------


def messages_request(body: CountTokensRequest, sampling: SamplingDefaults = NO_DEFAULTS) -> ChatRequest:
    """Accepts a request for a message, or one that only counts tokens.

    `sampling`: for requests that leave the values out.
    """
    tools = [_tool(i, tool) for i, tool in callable_tools(body.tools, None, "custom")]
    format_ = body.output_config.format if body.output_config else None
    grammar = None if format_ is None else schema_grammar(format_.schema_)
    if isinstance(body, MessagesRequest):
        check_stops("stop_sequences", body.stop_sequences)
        params = sampling_params(
            body,
            sampling,
            max_tokens=body.max_tokens,
            stop=body.stop_sequences,
            thinking=_thinking_limit(body.thinking),
        )
    else:
        params = sampling_params(body, sampling, max_tokens=1)
    choice = body.tool_choice
    return ChatRequest(
        messages=_messages(body, tools),
        params=params,
        tools=tools,
        tool_choice=_choice(tools, choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        grammar=grammar_of(body, ("output_config.format", grammar)),
        template_kwargs=_template_kwargs(body),
    )


def asks_for_caching(body: MessagesRequest) -> bool:
    """True if the request itself, a tool or a content block has cache_control."""
    contents = [body.system, *(message.content for message in body.messages)]
    blocks = [*(body.tools or ()), *(block for content in contents for block in _blocks(content))]
    inner = [
        part for block in blocks if isinstance(block, ToolResultBlock) for part in _blocks(block.content)
    ]
    marks = [(block.model_extra or {}).get("cache_control") for block in (*blocks, *inner)]
    return any(mark is not None for mark in (body.cache_control, *marks))


def _blocks(content: str | Sequence[Any] | None) -> Sequence[Any]:
    return () if content is None or isinstance(content, str) else content


def _thinking_limit(thinking: ThinkingParam | None) -> int | None:
    """What the template cannot switch off is ended at once. Without the field nothing is enforced."""
    if thinking is None:
        return None
    return 0 if thinking.type == "disabled" else thinking.budget_tokens


def _template_kwargs(body: CountTokensRequest) -> dict[str, Any]:
    """Thinking is off unless the request enables it; for `adaptive` the template's default applies.

    If the last message is the assistant's, the answer continues that message.
    """
    effort = body.output_config.effort if body.output_config else None
    found: dict[str, Any] = {}
    if isinstance(body.messages[-1], AssistantMessageParam):
        found["continue_final_message"] = True
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled":
        found["enable_thinking"] = False
    elif thinking.type == "enabled":
        found["enable_thinking"] = True
        if thinking.budget_tokens is not None:
            found["thinking_budget"] = thinking.budget_tokens
    return found | template_kwargs(body, effort)


def _tool(index: int, tool: ToolParam) -> Tool:
    where = f"tools[{index}]"
    if tool.input_schema is None:
        raise invalid(f"{where}.input_schema", "is missing")
    for name, reason in REFUSED_TOOL_FIELDS.items():
        if (tool.model_extra or {}).get(name) not in (None, False, [], ["direct"]):
            raise refused(f"{where}.{name}", reason)
    return Tool(
        tool.name,
        tool.description or "",
        tool.input_schema,
        strict=tool.strict,
        is_deferred=bool(tool.defer_loading),
    )


def _choice(tools: Sequence[Tool], choice: ToolChoiceParam | None) -> ToolChoice:
    if choice is not None and choice.type == "tool":
        return named_tool(tools, choice.name or "")
    openai_words = {"any": "required", "none": "none"}
    return tool_choice_of(tools, openai_words.get(choice.type) if choice else None)


def _messages(body: CountTokensRequest, tools: Sequence[Tool]) -> list[Message]:
    found = [Message("system", _system_parts(body.system))] if body.system else []
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        if isinstance(message, AssistantMessageParam):
            found.append(_assistant(message))
        elif isinstance(message, SystemMessageParam):
            found.append(Message("system", text_parts(message.content)))
        else:
            found += _user(message, where, {tool.name: tool for tool in tools})
    return found


def _system_parts(system: str | Sequence[TextBlock]) -> tuple[Part, ...]:
    """The system prompt without the billing header that Claude Code puts first.

    The header differs in every request: no two prompts would share a prefix that can be cached.
    """
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    cleaned = [(text, BILLING_HEADER.sub("", text)) for text in texts]
    return tuple(TextPart(new) for old, new in cleaned if new or not old)


def _assistant(message: AssistantMessageParam) -> Message:
    if isinstance(message.content, str):
        return Message("assistant", text_parts(message.content))
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    texts = [TextPart(block.text) for block in message.content if isinstance(block, TextBlock)]
    calls = [
        ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    return Message("assistant", tuple(texts), "".join(thoughts) or None, tuple(calls))


def _user(message: UserMessageParam, where: str, tools: Mapping[str, Tool]) -> list[Message]:
    """Each tool result becomes a message of its own; the blocks between tool results become user messages."""
    if isinstance(message.content, str):
        return [Message("user", text_parts(message.content))]
    found: list[Message] = []
    parts: list[Part] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            found += [Message("user", tuple(parts))] if parts else []
            parts = []
            found.append(_tool_result(block, where, tools))
        else:
            parts.append(part_of(block, where))
    if parts or not found:
        found.append(Message("user", tuple(parts)))
    return found


def _tool_result(block: ToolResultBlock, where: str, tools: Mapping[str, Tool]) -> Message:
    if isinstance(block.content, list):
        parts = tuple(
            _definition(part, tools) if isinstance(part, ToolReferenceBlock) else part_of(part, where)
            for part in block.content
        )
    else:
        parts = text_parts(block.content or "")
    if block.is_error:
        parts = (TextPart(ERROR_PREFIX), *parts)
    return Message("tool", parts, tool_call_id=block.tool_use_id)


def _definition(block: ToolReferenceBlock, tools: Mapping[str, Tool]) -> TextPart:
    """A deferred tool as the model reads it: here, so that the prompt before it stays as it was."""
    tool = tools.get(block.tool_name)
    if tool is None:
        return TextPart(f"The tool {block.tool_name} is not available.")
    return TextPart(json.dumps(tool_dict(tool), ensure_ascii=False))
