"""The outbox of one request: its unread deltas, merged into one, so that a slow client costs no memory.

The engine thread puts. Any other thread, or an event loop, takes. A slow client delays no other client.
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
        """Wait for a delta and take everything unread as one delta. None: nothing came in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._unread is not None, timeout_s)
            delta, self._unread = self._unread, None
            return delta

    def take_now(self) -> Delta | None:
        return self.take(timeout_s=0)

    def call_on_put(self, wake: Callable[[], None]) -> None:
        """Call `wake` from the engine thread after each put, and at once if a delta is unread already."""
        with self._changed:
            self._wake = wake
            waiting = self._unread is not None
        if waiting:
            wake()
