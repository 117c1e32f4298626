"""Owns the normalisation of conversations for templates that take only some of them. Pure.

Must not know templates: `variants` offers changes from none to all; the renderer takes the first that fits.
A rule returns the conversation unchanged where it has nothing to do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from outrider.chat.conversation import Message, Part, Role, TextPart, ToolCall
from outrider.chat.tool_text import calls_as_text
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

CALL_ID_LENGTH = 9  # what Mistral's templates insist on


def role_named(name: str) -> Role:
    """The role that an API calls by this name."""
    if name not in ROLES:
        raise InvalidRequest(f"unknown role {name!r}: use one of {', '.join(ROLES)}")
    return ROLES[name]


def variants(messages: Sequence[Message]) -> Iterator[Conversation]:
    """The conversation as it is, then with one rule after the other applied to it."""
    current = list(messages)
    yield current
    for rule in RULES:
        changed = rule(current)
        if changed != current:
            current = changed
            yield current


def hoist_system(messages: Conversation) -> Conversation:
    """One system message, at the front, with what all of them say."""
    system = [message for message in messages if message.role == "system"]
    if not system or (len(system) == 1 and messages[0].role == "system"):
        return messages
    text = "\n\n".join(message.text for message in system if message.text)
    return [Message("system", (TextPart(text),)), *(m for m in messages if m.role != "system")]


def merge_neighbours(messages: Conversation) -> Conversation:
    """Plain messages of one role in a row become one; calls, tool results, lists and media stay apart."""
    merged: Conversation = []
    for message in messages:
        if merged and merged[-1].role == message.role and _is_plain(merged[-1]) and _is_plain(message):
            text = "\n\n".join(filter(None, (merged[-1].text, message.text)))
            merged[-1] = replace(merged[-1], content=(TextPart(text),))
        else:
            merged.append(message)
    return merged


def shorten_call_ids(messages: Conversation) -> Conversation:
    """Ids of nine letters and digits, the same for a call and its result."""
    return [
        replace(
            message,
            tool_calls=tuple(replace(call, id=_short_id(call.id)) for call in message.tool_calls),
            tool_call_id=None if message.tool_call_id is None else _short_id(message.tool_call_id),
        )
        for message in messages
    ]


def separate_calls(messages: Conversation) -> Conversation:
    """One call a turn: each assistant message with several calls becomes several, each before its result."""
    separate: Conversation = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        results = []
        while at < len(messages) and messages[at].role == "tool" and len(message.tool_calls) > 1:
            results.append(messages[at])
            at += 1
        separate += _one_by_one(message, results) if len(message.tool_calls) > 1 else [message]
    return separate


def forget_reasoning(messages: Conversation) -> Conversation:
    """No thinking of earlier turns, for templates that cannot place it beside text and calls."""
    return [replace(message, reasoning=None) for message in messages]


def show_results(messages: Conversation) -> Conversation:
    """Pictures among tool results come after them, from the user, for templates that would drop them."""
    shown: Conversation = []
    held: list[Part] = []
    for message in messages:
        if held and message.role != "tool":
            shown.append(Message("user", tuple(held)))
            held = []
        if message.role == "tool" and message.pictures:
            held += message.pictures
            texts = tuple(part for part in message.content if isinstance(part, TextPart))
            message = replace(message, content=texts or (TextPart("(a picture)"),))
        shown.append(message)
    return [*shown, Message("user", tuple(held))] if held else shown


def write_out_calls(messages: Conversation) -> Conversation:
    """Calls and results as text, for templates that know neither."""
    return merge_neighbours(calls_as_text(messages))


def fold_system(messages: Conversation) -> Conversation:
    """What the system says goes before the first thing that the user says."""
    if not messages or messages[0].role != "system":
        return messages
    text, rest = messages[0].text, messages[1:]
    if rest and rest[0].role == "user":
        return [replace(rest[0], content=_prefixed(text, rest[0].content)), *rest[1:]]
    return [Message("user", (TextPart(text),)), *rest]


# From what changes least to what changes most.
RULES: tuple[Callable[[Conversation], Conversation], ...] = (
    hoist_system,
    merge_neighbours,
    shorten_call_ids,
    separate_calls,
    forget_reasoning,
    show_results,
    write_out_calls,
    fold_system,
)


def _is_plain(message: Message) -> bool:
    """Whether it says one piece of text and nothing else."""
    is_text = len(message.content) == 1 and isinstance(message.content[0], TextPart)
    return is_text and not message.tool_calls and message.role != "tool"


def _prefixed(text: str, content: tuple[Part, ...]) -> tuple[Part, ...]:
    if content and isinstance(content[0], TextPart):
        return (TextPart(f"{text}\n\n{content[0].text}"), *content[1:])
    return (TextPart(text), *content)


def _one_by_one(message: Message, results: Conversation) -> Conversation:
    turns: Conversation = []
    left = list(results)
    for i, call in enumerate(message.tool_calls):
        said = message if i == 0 else replace(message, content=(), reasoning=None)
        turns.append(replace(said, tool_calls=(call,)))
        answers = [result for result in left if result.tool_call_id == call.id]
        turns += answers
        left = [result for result in left if result not in answers]
    return turns + left


def _short_id(id: str) -> str:
    if len(id) == CALL_ID_LENGTH and id.isalnum() and id.isascii():
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:CALL_ID_LENGTH]


def names_of_calls(messages: Sequence[Message]) -> dict[str, str]:
    """Which function each call id stands for."""
    calls: Iterator[ToolCall] = (call for message in messages for call in message.tool_calls)
    return {call.id: call.name for call in calls}
