"""Responses kept for `previous_response_id` and retrieval: in memory, within two bounds; the oldest go first.

Each keeps its whole conversation, so that it can be continued when those before it are gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.api.sse import to_json
from outrider.chat.conversation import MediaPart, Message, TextPart

MESSAGE_OVERHEAD_BYTES = 200


@dataclass(frozen=True)
class StoredResponse:
    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: tuple[Message, ...]  # the conversation with its answer, without instructions


class ResponseStore:
    """Used from the event loop only."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, response_id: str) -> StoredResponse | None:
        found = self._kept.get(response_id)
        if found is None:
            return None
        self._kept.move_to_end(response_id)
        return found[0]

    def put(self, stored: StoredResponse) -> None:
        """Keep it; one that alone is over the bound is not kept."""
        size = _size(stored)
        if size > self._max_bytes:
            return
        self._kept[stored.response["id"]] = (stored, size)
        self.num_bytes += size
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            _, (_, dropped) = self._kept.popitem(last=False)
            self.num_bytes -= dropped

    def delete(self, response_id: str) -> bool:
        found = self._kept.pop(response_id, None)
        if found is None:
            return False
        self.num_bytes -= found[1]
        return True


def _size(stored: StoredResponse) -> int:
    return len(to_json(stored.response)) + len(to_json(stored.input_items)) + _messages_size(stored.messages)


def _messages_size(messages: Sequence[Message]) -> int:
    size = 0
    for message in messages:
        parts = sum(len(part.source) for part in message.content if isinstance(part, MediaPart))
        parts += sum(len(part.text) for part in message.content if isinstance(part, TextPart))
        calls = sum(len(call.arguments) + len(call.name) for call in message.tool_calls)
        size += MESSAGE_OVERHEAD_BYTES + parts + calls + len(message.reasoning or "")
    return size
