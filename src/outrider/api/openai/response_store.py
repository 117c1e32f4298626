"""Responses stored in memory, for `previous_response_id` and retrieval. The least recently used go first.

A stored response holds its whole conversation: it can be continued after earlier responses are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.chat.conversation import MediaPart, Message, TextPart

# Python objects of a message, and around each of its texts and calls. Measured: 140 bytes each.
MESSAGE_OVERHEAD_BYTES = 200
PART_OVERHEAD_BYTES = 200


@dataclass(frozen=True)
class StoredResponse:
    id: str
    response: bytes  # JSON: many small objects would take much more memory than their text
    input_items: bytes  # JSON: the whole list object
    messages: tuple[Message, ...]  # input and answer of this response and all before it, no instructions


class ResponseStore:
    """The responses of all tenants. A tenant finds its own only. Used from the event loop only."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        found = self._stored.get((tenant, response_id))
        if found is None:
            return None
        self._stored.move_to_end((tenant, response_id))
        return found[0]

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """A response larger than the whole store is not stored."""
        size = _size(stored)
        if size > self._max_bytes:
            return
        self._stored[tenant, stored.id] = (stored, size)
        self.num_bytes += size
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            _, (_, dropped) = self._stored.popitem(last=False)
            self.num_bytes -= dropped

    def delete(self, tenant: str, response_id: str) -> bool:
        found = self._stored.pop((tenant, response_id), None)
        if found is None:
            return False
        self.num_bytes -= found[1]
        return True


def _size(stored: StoredResponse) -> int:
    return len(stored.response) + len(stored.input_items) + _messages_size(stored.messages)


def _messages_size(messages: Sequence[Message]) -> int:
    size = 0
    for message in messages:
        parts = sum(len(part.source) for part in message.content if isinstance(part, MediaPart))
        parts += sum(len(part.text) for part in message.content if isinstance(part, TextPart))
        calls = sum(len(call.arguments) + len(call.name) for call in message.tool_calls)
        size += PART_OVERHEAD_BYTES * (len(message.content) + len(message.tool_calls))
        size += MESSAGE_OVERHEAD_BYTES + parts + calls + len(message.reasoning or "")
    return size
