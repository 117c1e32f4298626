"""Anthropic's messages request in canonical form. What cannot be honoured is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from outrider.api.anthropic import messages_schema as schema
from outrider.api.errors import invalid, refused
from outrider.api.openai.chat_input import named_tool, plain_choice
from outrider.api.params import grammar_of, sampling_params, schema_grammar, template_kwargs
from outrider.chat.conversation import (
    ChatRequest,
    MediaPart,
    Message,
    Part,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)

ERROR_MARK = "Error: "  # how a tool_result with is_error is told to the model
BILLING_NOTE = re.compile(r"\A(?:x-anthropic-[a-z-]+:[^\n]*\n?)+")
TOOL_FIELDS = {  # of a tool, that would change what the model sees or may do
    "input_examples": "put examples into the description",
    "defer_loading": "all tools are loaded at once",
    "allowed_callers": "tools are called by the model, directly",
}


def messages_request(body: schema.CountTokensRequest) -> ChatRequest:
    """Of a messages request, or of a request to count its tokens."""
    tools = [_tool(i, tool) for i, tool in enumerate(body.tools or ())]
    format_ = body.output_config.format if body.output_config else None
    grammar = None if format_ is None else schema_grammar(format_.schema_)
    if isinstance(body, schema.MessagesRequest):
        params = sampling_params(body, max_tokens=body.max_tokens, stop=body.stop_sequences)
    else:
        params = sampling_params(body, max_tokens=1)
    choice = body.tool_choice
    return ChatRequest(
        messages=_messages(body),
        params=params,
        tools=tools,
        tool_choice=_choice(tools, choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        grammar=grammar_of(body, ("output_config.format", grammar)),
        template_kwargs=_template_kwargs(body),
    )


def _template_kwargs(body: schema.CountTokensRequest) -> dict[str, Any]:
    """Thinking is off unless asked for; an adaptive model is left to its template. An assistant's message at
    the end is the beginning of the answer."""
    effort = body.output_config.effort if body.output_config else None
    found: dict[str, Any] = {}
    if isinstance(body.messages[-1], schema.AssistantMessage):
        found["continue_final_message"] = True
    thinking = body.thinking
    if thinking is None or thinking.type == "disabled":
        found["enable_thinking"] = False
    elif thinking.type == "enabled":
        found["enable_thinking"] = True
        if thinking.budget_tokens is not None:
            found["thinking_budget"] = thinking.budget_tokens
    return found | template_kwargs(body, effort)


# -- tools -----------------------------------------------------------------------------------------------


def _tool(index: int, tool: schema.ToolParam) -> Tool:
    where = f"tools[{index}]"
    if tool.type not in (None, "custom"):
        raise refused(where, f"tools of type {tool.type!r} are not supported, only those you define yourself")
    if tool.input_schema is None:
        raise invalid(f"{where}.input_schema", "is missing")
    for name, reason in TOOL_FIELDS.items():
        if (tool.model_extra or {}).get(name) not in (None, False, [], ["direct"]):
            raise refused(f"{where}.{name}", reason)
    return Tool(tool.name, tool.description or "", tool.input_schema, strict=bool(tool.strict))


def _choice(tools: Sequence[Tool], choice: schema.ToolChoiceParam | None) -> ToolChoice:
    if choice is not None and choice.type == "tool":
        return named_tool(tools, choice.name or "")
    names = {"any": "required", "none": "none"}
    return plain_choice(tools, names.get(choice.type) if choice else None)


# -- messages --------------------------------------------------------------------------------------------


def _messages(body: schema.CountTokensRequest) -> list[Message]:
    found = [Message("system", _system_parts(body.system))] if body.system else []
    for i, message in enumerate(body.messages):
        where = f"messages[{i}]"
        if isinstance(message, schema.AssistantMessage):
            found.append(_assistant(message))
        elif isinstance(message, schema.SystemMessage):
            found.append(Message("system", _text_parts(message.content)))
        else:
            found += _user(message, where)
    return found


def _system_parts(system: str | Sequence[schema.TextBlock]) -> tuple[Part, ...]:
    """Without the note to the biller that some clients put first: it changes with every request, so that no
    two prompts would begin alike and nothing could be cached."""
    parts = [part for part in _text_parts(system) if isinstance(part, TextPart)]
    kept = [TextPart(BILLING_NOTE.sub("", part.text)) for part in parts]
    return tuple(new for old, new in zip(parts, kept, strict=True) if new.text or not old.text)


def _assistant(message: schema.AssistantMessage) -> Message:
    if isinstance(message.content, str):
        return Message("assistant", _text_parts(message.content))
    thoughts = [block.thinking for block in message.content if isinstance(block, schema.ThinkingBlock)]
    texts = [TextPart(block.text) for block in message.content if isinstance(block, schema.TextBlock)]
    calls = [
        ToolCall(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        for block in message.content
        if isinstance(block, schema.ToolUseBlock)
    ]
    return Message("assistant", tuple(texts), "".join(thoughts) or None, tuple(calls))


def _user(message: schema.UserMessage, where: str) -> list[Message]:
    """One message; each tool result in it is a message of its own, in its place."""
    if isinstance(message.content, str):
        return [Message("user", _text_parts(message.content))]
    found: list[Message] = []
    parts: list[Part] = []
    for block in message.content:
        if isinstance(block, schema.ToolResultBlock):
            found += [Message("user", tuple(parts))] if parts else []
            parts = []
            found.append(_tool_result(block, where))
        else:
            parts.append(_part(block, where))
    if parts or not found:
        found.append(Message("user", tuple(parts)))
    return found


def _tool_result(block: schema.ToolResultBlock, where: str) -> Message:
    if isinstance(block.content, list):
        parts = tuple(_part(part, where) for part in block.content)
    else:
        parts = _text_parts(block.content or "")
    if block.is_error:
        parts = (TextPart(ERROR_MARK), *parts)
    return Message("tool", parts, tool_call_id=block.tool_use_id)


def _text_parts(content: str | Sequence[schema.TextBlock]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    return tuple(TextPart(block.text) for block in content)


def _part(block: Any, where: str) -> Part:
    if isinstance(block, schema.TextBlock):
        return TextPart(block.text)
    if isinstance(block, schema.ImageBlock):
        return _picture(block.source, where)
    return _document(block, where)


def _picture(source: schema.Source, where: str) -> MediaPart:
    if source.type == "url" and source.url is not None:
        return MediaPart("image", source.url)
    if source.type == "base64" and source.data is not None and source.media_type is not None:
        return MediaPart("image", f"data:{source.media_type};base64,{source.data}")
    raise refused(where, f"pictures come as base64 or url, not as {source.type!r}")


def _document(block: schema.DocumentBlock, where: str) -> TextPart:
    """A document that is text already is read to the model as text, under its title."""
    source = block.source
    if source.type == "text" and source.data is not None:
        text = source.data
    elif source.type == "content" and source.content is not None:
        content = source.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
    else:
        raise refused(where, f"documents come as text here, not as {source.type!r}")
    heading = [line for line in (block.title, block.context) if line]
    return TextPart("\n".join([*heading, text]))
