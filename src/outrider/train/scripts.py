"""Turns training conversations into token ids: with the chat template, or as plain text.

Chat prompts are rendered exactly as the server renders them. Must not know the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from outrider.chat.conversation import ChatRequest
from outrider.chat.message_dicts import messages_from_dicts
from outrider.chat.renderer import ChatRenderer
from outrider.request import InvalidRequest, SamplingParams
from outrider.train.errors import TrainingError
from outrider.train.prompts import Message


class Script(Protocol):
    """The two kinds of prompts that synthesis needs."""

    has_roles: bool

    def to_answer(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt up to the start of the model's answer."""
        ...

    def to_continue(self, messages: Sequence[Message], opening: str) -> tuple[int, ...]:
        """The prompt up to the end of `opening`, the start of a user turn: the model continues the turn."""
        ...


def script_for(tokenizer: Any) -> Script:
    has_template = getattr(tokenizer, "has_chat_template", False)
    return ChatScript(ChatRenderer(tokenizer)) if has_template else PlainScript(tokenizer)


class ChatScript:
    has_roles = True

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self.to_answer([_user("x")])  # fails now if the template accepts no user message

    def to_answer(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._render(messages)

    def to_continue(self, messages: Sequence[Message], opening: str) -> tuple[int, ...]:
        return self._render([*messages, _user(opening)], continue_final_message=True)

    def _render(self, messages: Sequence[Message], **kwargs: bool) -> tuple[int, ...]:
        request = ChatRequest(messages_from_dicts(messages), SamplingParams(), template_kwargs=kwargs)
        try:
            return self._renderer.render_messages(request).ids
        except InvalidRequest as error:
            raise TrainingError(f"The conversation cannot be rendered: {error}.") from error


class PlainScript:
    has_roles = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def to_answer(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode("".join(one["content"] for one in messages)))

    def to_continue(self, messages: Sequence[Message], opening: str) -> tuple[int, ...]:
        return self.to_answer([*messages, _user(opening)])


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
