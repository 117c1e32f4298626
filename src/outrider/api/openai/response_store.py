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
    output_ids: tuple[str, ...] = ()  # of the items of its answer


class ResponseStore:
    """The responses of all tenants. Used from the event loop only.

    A tenant finds its own only. If there are too many, the tenant with the most loses its oldest: nobody can
    push out the responses of others.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._tenants: dict[str, _Stored] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        own = self._tenants.get(tenant, _Stored())
        if response_id not in own:
            return None
        own.move_to_end(response_id)
        return own[response_id][0]

    def with_item(self, tenant: str, item_id: str) -> StoredResponse | None:
        """The response whose answer has an item with this id."""
        response_id = self._tenants.get(tenant, _Stored()).item_owners.get(item_id)
        return None if response_id is None else self.get(tenant, response_id)

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """A response larger than the whole store is not stored."""
        size = _size(stored)
        if size > self._max_bytes:
            return
        own = self._tenants.setdefault(tenant, _Stored())
        own[stored.id] = (stored, size)
        own.item_owners.update(dict.fromkeys(stored.output_ids, stored.id))
        self.num_bytes += size
        while len(self) > self._max_responses:
            self._drop_oldest(max(self._tenants, key=lambda name: len(self._tenants[name])))
        while self.num_bytes > self._max_bytes:
            self._drop_oldest(max(self._tenants, key=lambda name: self._tenants[name].num_bytes))

    def delete(self, tenant: str, response_id: str) -> bool:
        own = self._tenants.get(tenant, _Stored())
        if response_id not in own:
            return False
        stored, size = own.pop(response_id)
        self.num_bytes -= size
        for item_id in stored.output_ids:
            own.item_owners.pop(item_id, None)
        if not own:
            del self._tenants[tenant]
        return True

    def _drop_oldest(self, tenant: str) -> None:
        self.delete(tenant, next(iter(self._tenants[tenant])))


class _Stored(OrderedDict[str, tuple[StoredResponse, int]]):
    """The responses of one tenant and their sizes, the most recently used last."""

    def __init__(self) -> None:
        super().__init__()
        self.item_owners: dict[str, str] = {}  # response id by the id of an item of its answer

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.values())


def _size(stored: StoredResponse) -> int:
    texts = len(stored.response) + len(stored.input_items)
    return texts + PART_OVERHEAD_BYTES * len(stored.output_ids) + _messages_size(stored.messages)


def _messages_size(messages: Sequence[Message]) -> int:
    size = 0
    for message in messages:
        parts = sum(len(part.source) for part in message.content if isinstance(part, MediaPart))
        parts += sum(len(part.text) for part in message.content if isinstance(part, TextPart))
        calls = sum(len(call.arguments) + len(call.name) for call in message.tool_calls)
        size += PART_OVERHEAD_BYTES * (len(message.content) + len(message.tool_calls))
        size += MESSAGE_OVERHEAD_BYTES + parts + calls + len(message.reasoning or "")
    return size
