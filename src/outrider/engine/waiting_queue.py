"""The requests that wait for a row, and which of them starts next. Pure Python.

    1. rows that were preempted or failed, the oldest first: they come back before anything new starts
    2. tenants in turn (a tenant is an API key): one with a thousand requests keeps nobody else waiting
    3. of a tenant's requests the one with the lowest `priority`, and among equals the first that came

A priority orders a tenant's own requests only: no key can overtake another one by it. And it starves none: a
tenant's oldest request is overtaken at most MAX_OVERTAKEN times, then it starts next.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator

from outrider.engine.sequence import Sequence

MAX_OVERTAKEN = 64  # requests of lower priority values that start before a tenant's oldest; chosen by hand


class WaitingQueue:
    def __init__(self) -> None:
        self._returning: deque[Sequence] = deque()
        self._tenants: OrderedDict[str, _Line] = OrderedDict()  # with requests that wait, the next one first
        self._num_new = 0

    def __len__(self) -> int:
        return len(self._returning) + self._num_new

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returning
        for line in self._tenants.values():
            yield from line

    def add(self, sequence: Sequence) -> None:
        self._tenants.setdefault(sequence.params.tenant, _Line()).add(sequence)
        self._num_new += 1

    def add_returning(self, sequence: Sequence) -> None:
        """A row that has lost its cells. Of several at once, the youngest is added first."""
        self._returning.appendleft(sequence)

    @property
    def next(self) -> Sequence | None:
        """The request that starts next; None if none waits."""
        if self._returning:
            return self._returning[0]
        line = next(iter(self._tenants.values()), None)
        return None if line is None else line.next

    def take(self) -> Sequence:
        """Remove and return `next`. Then it is another tenant's turn."""
        if self._returning:
            return self._returning.popleft()
        tenant, line = next(iter(self._tenants.items()))
        sequence = line.take()
        self._num_new -= 1
        self._tenants.move_to_end(tenant)
        if not line:
            del self._tenants[tenant]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Of a request that was cancelled or has failed."""
        if sequence in self._returning:
            self._returning.remove(sequence)
            return
        line = self._tenants[sequence.params.tenant]
        line.remove(sequence)
        self._num_new -= 1
        if not line:
            del self._tenants[sequence.params.tenant]


class _Line:
    """The requests of one tenant."""

    def __init__(self) -> None:
        self._by_arrival: OrderedDict[int, Sequence] = OrderedDict()  # by id
        self._by_priority: list[tuple[int, int]] = []  # a heap of (priority, id), with ids that have left
        self._num_overtaken = 0  # of the oldest request

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_arrival.values())

    def add(self, sequence: Sequence) -> None:
        self._by_arrival[sequence.id] = sequence
        heapq.heappush(self._by_priority, (sequence.params.priority, sequence.id))

    @property
    def next(self) -> Sequence:
        oldest = next(iter(self._by_arrival.values()))
        if self._num_overtaken >= MAX_OVERTAKEN:
            return oldest
        while self._by_priority[0][1] not in self._by_arrival:
            heapq.heappop(self._by_priority)
        return self._by_arrival[self._by_priority[0][1]]

    def take(self) -> Sequence:
        sequence = self.next
        is_oldest = sequence is next(iter(self._by_arrival.values()))
        self.remove(sequence)
        if not is_oldest:
            self._num_overtaken += 1
        return sequence

    def remove(self, sequence: Sequence) -> None:
        if sequence is next(iter(self._by_arrival.values())):
            self._num_overtaken = 0
        del self._by_arrival[sequence.id]
