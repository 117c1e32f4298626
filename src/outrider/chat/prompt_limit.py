"""Owns the refusal of prompts that are far too long, before time is spent on them.

The exact check counts the tokens of the whole prompt (`engine.validation`). To encode a million characters
takes a second or more, so a long text is refused earlier: by its length, or by the tokens of its first part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.chat.conversation import ChatRequest, Message, TextPart
from outrider.request import PromptTooLong

# Characters of a prompt for each token of the context; chosen by hand. Prose has about 4 characters for each
# token and indented code 8. Only long runs of one character have more than 32.
MAX_CHARACTERS_PER_TOKEN = 32
CHARACTERS_PER_TOKEN = 4  # for the estimate in the message about a prompt that is not encoded
FIRST_PART = 8  # characters for each token of the context that are encoded first; chosen by hand
# The first part's tokens depend a little on the text after it. So that no prompt is refused that fits, the
# first part must have this many times the tokens of the context. Chosen by hand.
MARGIN = 2
AROUND_MESSAGE = 20  # characters that a template writes around a message or a call; chosen by hand
AROUND_VALUE = 4  # the same for a JSON value


@dataclass(frozen=True)
class PromptLimit:
    max_tokens: int  # the context: prompt and answer

    def check_characters(self, count: int) -> None:
        if count > MAX_CHARACTERS_PER_TOKEN * self.max_tokens:
            self._refuse(f"{count:,} characters", f"about {count // CHARACTERS_PER_TOKEN} tokens")

    def encode(
        self, texts: Iterable[str], encode: Callable[[str], list[int]], is_cut: bool = False
    ) -> list[int]:
        """The ids of all texts. Stops when they are far over the context, unless the prompt will be cut."""
        ids: list[int] = []
        for text in texts:
            if is_cut:
                ids += encode(text)
                continue
            first_part = text[: FIRST_PART * self.max_tokens]
            if len(first_part) < len(text):
                self._check_tokens(len(ids) + len(encode(first_part)))
            ids += encode(text)
            self._check_tokens(len(ids))
        return ids

    def _check_tokens(self, count: int) -> None:
        if count > MARGIN * self.max_tokens:
            self._refuse(f"more than {count:,} tokens", f"more than {count} tokens")

    def _refuse(self, what: str, size: str) -> None:
        raise PromptTooLong(
            f"the prompt has {what} and the context holds {self.max_tokens} tokens, answer included: "
            "shorten it",
            size,
            self.max_tokens,
        )


NO_LIMIT = PromptLimit(max_tokens=sys.maxsize)


def num_characters(request: ChatRequest) -> int:
    """About the characters of a prompt: those of all texts in it, of the prediction, and around them."""
    tools = [[tool.name, tool.description, dict(tool.parameters)] for tool in request.active_tools.values()]
    others = _json_characters([tools, dict(request.template_kwargs), request.prediction])
    return sum(map(_message_characters, request.messages)) + others


def _message_characters(message: Message) -> int:
    texts = [part.text for part in message.content if isinstance(part, TextPart)]
    calls = [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
    names = [message.reasoning or "", message.tool_call_id or "", message.name or ""]
    around = AROUND_MESSAGE * (1 + len(message.tool_calls))
    return around + sum(map(len, (*texts, *calls, *names)))


def _json_characters(value: Sequence[Any]) -> int:
    count = 0
    unseen: list[Any] = [value]
    while unseen:
        outer = unseen.pop()
        members = [*outer, *outer.values()] if isinstance(outer, dict) else outer
        count += AROUND_VALUE * len(members) + sum(len(text) for text in members if isinstance(text, str))
        unseen += [member for member in members if isinstance(member, (dict, list, tuple))]
    return count
