"""A message as it grows: canonical events in, Anthropic's stream events out, the whole message at the end.

    message_start, ping
      content_block_start, (content_block_delta ...), content_block_stop    for each: thinking, text, tool_use
    message_delta, message_stop

Must not know HTTP. Failures are the route's: they are no messages.
"""

from __future__ import annotations

import json
from typing import Any

from outrider.chat.events import (
    ChatEvent,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)

Event = dict[str, Any]

PING: Event = {"type": "ping"}
SIGNATURE = "outrider"  # clients keep and return it; nothing here needs to verify it


class MessageBuilder:
    """Whole and streamed messages come from here."""

    def __init__(
        self,
        message_id: str,
        model: str,
        num_prompt: int,
        max_tokens: int,
        shows_thinking: bool = True,
        asks_for_caching: bool = False,
    ) -> None:
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(Usage(num_prompt=num_prompt), asks_for_caching),
        }
        self._max_tokens = max_tokens
        self._asks_for_caching = asks_for_caching
        self._shows_thinking = shows_thinking
        self._open: str | None = None  # the kind of the block under way
        self._arguments = ""

    def start(self) -> list[Event]:
        return [{"type": "message_start", "message": self.message | {"content": []}}, PING]

    def feed(self, event: ChatEvent) -> list[Event]:
        match event:
            case TextDelta(text):
                return [*self._enter({"type": "text", "text": ""}), self._text(text)]
            case ReasoningDelta(text):
                begun = self._enter({"type": "thinking", "thinking": "", "signature": ""})
                return [*begun, *self._thought(text)]
            case ToolCallStarted(_, call_id, name):
                ended = self._leave()
                return [*ended, *self._enter({"type": "tool_use", "id": call_id, "name": name, "input": {}})]
            case ToolCallArguments(_, fragment):
                self._arguments += fragment
                return [self._delta({"type": "input_json_delta", "partial_json": fragment})]
            case ToolCallEnded(_, arguments):
                self._arguments = arguments
                return self._leave()
            case Finished():
                return self._finish(event)
            case _:
                return []

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _enter(self, block: dict[str, Any]) -> list[Event]:
        """Go on with a block of this kind, or begin one."""
        if self._open == block["type"]:
            return []
        ended = self._leave()
        self._open = block["type"]
        self._arguments = ""
        self.message["content"].append(block)
        return [*ended, {"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _text(self, text: str) -> Event:
        self.message["content"][-1]["text"] += text
        return self._delta({"type": "text_delta", "text": text})

    def _thought(self, text: str) -> list[Event]:
        if not self._shows_thinking:
            return []
        self.message["content"][-1]["thinking"] += text
        return [self._delta({"type": "thinking_delta", "thinking": text})]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _leave(self) -> list[Event]:
        kind, self._open = self._open, None
        if kind is None:
            return []
        block = self.message["content"][-1]
        events = []
        if kind == "thinking":
            block["signature"] = SIGNATURE
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        elif kind == "tool_use":
            block["input"] = _parsed(self._arguments)
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _finish(self, finished: Finished) -> list[Event]:
        ended = self._leave()
        reason = stop_reason(finished, self._max_tokens)
        sequence = finished.stop_string if reason == "stop_sequence" else None
        usage = usage_of(finished.usage, self._asks_for_caching)
        self.message |= {"stop_reason": reason, "stop_sequence": sequence, "usage": usage}
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [*ended, {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]


def stop_reason(finished: Finished, max_tokens: int) -> str:
    match finished.reason:
        case "tool_calls":
            return "tool_use"
        case "length":
            is_full = finished.usage.num_generated < max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        case _:
            return "stop_sequence" if finished.stop_string is not None else "end_turn"


def usage_of(usage: Usage, asks_for_caching: bool) -> dict[str, Any]:
    """Anthropic counts three parts of a prompt: read from the cache, put into it, and the rest.

    All prompts are cached; only who asked for it (cache_control) is told what was put in.
    """
    num_created = usage.num_stored if asks_for_caching else 0
    return {
        "input_tokens": usage.num_prompt - usage.num_cached - num_created,
        "cache_creation_input_tokens": num_created,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning},
    }


def _parsed(arguments: str) -> Any:
    """A call that was cut off has no input that JSON could hold."""
    try:
        return json.loads(arguments) if arguments else {}
    except ValueError:
        return {}
