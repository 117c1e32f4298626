"""How a conversation is put before the model: through its chat template, or as plain text where it has none.

Owns the way from messages to token ids. Must not know the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from outrider.train.errors import TrainingError
from outrider.train.prompts import Message

MARK = "OUTRIDERMARK"


class Script(Protocol):
    """Two ways to show the model a conversation."""

    has_roles: bool

    def to_answer(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Up to where the model's answer begins."""
        ...

    def to_continue(self, messages: Sequence[Message], opening: str) -> tuple[int, ...]:
        """Up to the end of `opening`, with which the next user turn begins: the model goes on as the user."""
        ...


def script_for(tokenizer: Any) -> Script:
    return ChatScript(tokenizer) if getattr(tokenizer, "has_chat_template", False) else PlainScript(tokenizer)


class ChatScript:
    has_roles = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._takes_system = self._renders([{"role": "system", "content": "x"}, _user("y")])
        if not self._renders([_user("x")]):
            raise TrainingError("The model's chat template does not render a single user message.")

    def to_answer(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self._template(messages, add_generation_prompt=True))

    def to_continue(self, messages: Sequence[Message], opening: str) -> tuple[int, ...]:
        text = self._template([*messages, _user(MARK)], tokenize=False)
        before, mark, _ = text.rpartition(MARK)
        if not mark:
            raise TrainingError("The model's chat template drops what the user says.")
        return tuple(self._tokenizer.encode(before + opening, add_special_tokens=False))

    def _template(self, messages: Sequence[Message], **options: Any) -> Any:
        if not self._takes_system:
            messages = [one for one in messages if one["role"] != "system"]
        return self._tokenizer.apply_chat_template(list(messages), **options)

    def _renders(self, messages: Sequence[Message]) -> bool:
        try:
            self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        except Exception:  # templates raise whatever they like
            return False
        return True


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
