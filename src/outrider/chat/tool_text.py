"""Owns tools in plain words, for models whose template says nothing of tools: the system message tells them.

Calls and results of earlier turns are written in the same words, as the default format has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.chat.conversation import Message, Part, TextPart, Tool, ToolCall
from outrider.chat.json_text import dumps


def with_tools_told(messages: Sequence[Message], tools: Sequence[Tool], instructions: str) -> list[Message]:
    """The conversation with the tools described in its first system message."""
    told = _description(tools, instructions)
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=(*first.content, TextPart(f"\n{told}"))), *messages[1:]]
    return [Message("system", (TextPart(told),)), *messages]


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """The conversation with its calls in the assistant's text and their results in the user's."""
    return [_in_words(message) for message in messages]


def _in_words(message: Message) -> Message:
    if message.role == "tool":
        text = f"<tool_response>\n{message.text}\n</tool_response>"
        return Message("user", (TextPart(text), *message.pictures))
    if not message.tool_calls:
        return message
    said = [message.text] if message.text else []
    text = "\n".join([*said, *map(_call_in_words, message.tool_calls)])
    content: tuple[Part, ...] = (TextPart(text),)
    return replace(message, content=content, tool_calls=())


def _call_in_words(call: ToolCall) -> str:
    written = f'{{"name": {dumps(call.name)}, "arguments": {call.arguments or "{}"}}}'
    return f"<tool_call>\n{written}\n</tool_call>"


def _description(tools: Sequence[Tool], instructions: str) -> str:
    functions = "\n".join(dumps(_signature(tool)) for tool in tools)
    return f"You can call these functions:\n{functions}\n\n{instructions}"


def _signature(tool: Tool) -> dict[str, object]:
    return {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
