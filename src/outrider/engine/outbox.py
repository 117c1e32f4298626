"""What one request has gained and its client has not read yet. Bounded: unread deltas are merged into one.

The engine thread puts, any other thread or an event loop takes. A slow reader costs no one else anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from outrider.engine.sequence import Delta


class Outbox:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unread: Delta | None = None
        self._wake: Callable[[], None] | None = None

    def put(self, delta: Delta) -> None:
        with self._changed:
            self._unread = delta if self._unread is None else self._unread.merged(delta)
            self._changed.notify_all()
            wake = self._wake
        if wake is not None:
            wake()

    def take(self, timeout_s: float | None = None) -> Delta | None:
        """Everything unread as one delta; waits for it. None: nothing came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._unread is not None, timeout_s)
            delta, self._unread = self._unread, None
            return delta

    def take_now(self) -> Delta | None:
        return self.take(timeout_s=0)

    def call_on_put(self, wake: Callable[[], None]) -> None:
        """Have `wake` called from the engine thread whenever something is put (now, if something waits)."""
        with self._changed:
            self._wake = wake
            waiting = self._unread is not None
        if waiting:
            wake()
