"""Owns the rewriting of conversations for templates that accept only some of them. Pure.

Must not know templates: `variants` offers the conversation with ever more changes, and the template takes the
first variant that it accepts. A rule returns the conversation unchanged where the rule does not apply.

A model whose template does not mention tools gets them as text: the tools in the system message, calls and
results of earlier turns in the default tool format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from outrider.chat.conversation import Message, Part, Role, TextPart, Tool
from outrider.chat.json_text import dumps
from outrider.request import InvalidRequest

Conversation = list[Message]

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

CALL_ID_LENGTH = 9  # characters: the length that Mistral's templates require


def role_named(name: object) -> Role:
    """The canonical role for a role name of an API."""
    if not isinstance(name, str) or name not in ROLES:
        raise InvalidRequest(f"unknown role {name!r}: use one of {', '.join(ROLES)}")
    return ROLES[name]


def variants(messages: Sequence[Message]) -> Iterator[Conversation]:
    """The conversation after each rule in turn, applied to the result of the rules before."""
    current = list(messages)
    for rule in RULES:
        changed = rule(current)
        if changed != current:
            current = changed
            yield current


# -- rules -----------------------------------------------------------------------------------------------


def hoist_system(messages: Conversation) -> Conversation:
    """Join all system messages into one at the front."""
    system = [message for message in messages if message.role == "system"]
    if not system or (len(system) == 1 and messages[0].role == "system"):
        return messages
    text = "\n\n".join(message.text for message in system if message.text)
    return [Message("system", (TextPart(text),)), *(m for m in messages if m.role != "system")]


def merge_neighbours(messages: Conversation) -> Conversation:
    """Join consecutive messages of one role, if both are a single text without calls or media."""
    merged: Conversation = []
    for (_, is_plain), run in groupby(messages, lambda message: (message.role, _is_plain(message))):
        neighbours = list(run)
        if is_plain and len(neighbours) > 1:
            text = "\n\n".join(message.text for message in neighbours if message.text)
            neighbours = [replace(neighbours[0], content=(TextPart(text),))]
        merged += neighbours
    return merged


def shorten_call_ids(messages: Conversation) -> Conversation:
    """Replace call ids by ids of nine letters and digits, the same for a call and its result."""
    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=_short_id(call.id)) for call in message.tool_calls),
            tool_call_id=None if message.tool_call_id is None else _short_id(message.tool_call_id),
        )
        for message in messages
    ]


def separate_calls(messages: Conversation) -> Conversation:
    """Split each assistant message with several calls into messages of one call, each before its result."""
    separate: Conversation = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if len(message.tool_calls) <= 1:
            separate.append(message)
            continue
        results: dict[str | None, Conversation] = {}  # by call id
        while at < len(messages) and messages[at].role == "tool":
            results.setdefault(messages[at].tool_call_id, []).append(messages[at])
            at += 1
        for i, call in enumerate(message.tool_calls):
            turn = message if i == 0 else replace(message, content=(), reasoning=None)
            separate += [replace(turn, tool_calls=(call,)), *results.pop(call.id, ())]
        separate += [result for of_unknown_call in results.values() for result in of_unknown_call]
    return separate


def drop_reasoning(messages: Conversation) -> Conversation:
    """Remove the reasoning of earlier turns, for templates that cannot place it beside text and calls."""
    return [replace(message, reasoning=None) for message in messages]


def move_result_images(messages: Conversation) -> Conversation:
    """Move images of tool results into a user message behind them, for templates that would drop them."""
    moved: Conversation = []
    waiting: list[Part] = []
    for message in messages:
        if waiting and message.role != "tool":
            moved.append(Message("user", tuple(waiting)))
            waiting = []
        if message.role == "tool" and message.image_parts:
            waiting += message.image_parts
            texts = tuple(part for part in message.content if isinstance(part, TextPart))
            message = replace(message, content=texts or (TextPart("(a picture)"),))
        moved.append(message)
    return [*moved, Message("user", tuple(waiting))] if waiting else moved


def write_calls_as_text(messages: Conversation) -> Conversation:
    """Calls and results as text, for templates that know neither."""
    return merge_neighbours(calls_as_text(messages))


def fold_system(messages: Conversation) -> Conversation:
    """Put the system message at the start of the first user message."""
    if not messages or messages[0].role != "system":
        return messages
    text, rest = messages[0].text, messages[1:]
    if not rest or rest[0].role != "user":
        return [Message("user", (TextPart(text),)), *rest]
    content = rest[0].content
    if content and isinstance(content[0], TextPart):
        content = (TextPart(f"{text}\n\n{content[0].text}"), *content[1:])
    else:
        content = (TextPart(text), *content)
    return [replace(rest[0], content=content), *rest[1:]]


# The rule that changes least comes first.
RULES: tuple[Callable[[Conversation], Conversation], ...] = (
    hoist_system,
    merge_neighbours,
    shorten_call_ids,
    separate_calls,
    drop_reasoning,
    move_result_images,
    write_calls_as_text,
    fold_system,
)


def _is_plain(message: Message) -> bool:
    """True if the message is one text part and nothing else."""
    is_text = len(message.content) == 1 and isinstance(message.content[0], TextPart)
    return is_text and not message.tool_calls and message.role != "tool"


def _short_id(id: str) -> str:
    if len(id) == CALL_ID_LENGTH and id.isalnum() and id.isascii():
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:CALL_ID_LENGTH]


# -- tools as text ---------------------------------------------------------------------------------------


def describe_tools(messages: Sequence[Message], tools: Sequence[Tool], instructions: str) -> list[Message]:
    """The conversation with the tools described in its first system message."""
    signatures = [
        {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
        for tool in tools
    ]
    functions = "\n".join(map(dumps, signatures))
    text = f"You can call these functions:\n{functions}\n\n{instructions}"
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=(*first.content, TextPart(f"\n{text}"))), *messages[1:]]
    return [Message("system", (TextPart(text),)), *messages]


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """The conversation with calls in the assistant's text and their results in user messages."""
    return [_call_as_text(message) for message in messages]


def _call_as_text(message: Message) -> Message:
    if message.role == "tool":
        text = f"<tool_response>\n{message.text}\n</tool_response>"
        return Message("user", (TextPart(text), *message.image_parts))
    if not message.tool_calls:
        return message
    texts = [message.text] if message.text else []
    for call in message.tool_calls:
        written = f'{{"name": {dumps(call.name)}, "arguments": {call.arguments or "{}"}}}'
        texts.append(f"<tool_call>\n{written}\n</tool_call>")
    return replace(message, content=(TextPart("\n".join(texts)),), tool_calls=())
