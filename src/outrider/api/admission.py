"""Who may come in: a bound on the requests that decode or wait, and the closed door of a shutdown.

Counts engine requests (n choices count n times). Must not know rows or memory: the engine queues the rest.
"""

from __future__ import annotations

from outrider.api.errors import ApiError


class Ticket:
    """Places taken by one API request. Giving them back twice is harmless."""

    def __init__(self, admission: Admission, num_places: int) -> None:
        self._admission = admission
        self.num_places = num_places

    def leave(self) -> None:
        self._admission.num_live -= self.num_places
        self.num_places = 0


class Admission:
    """Used from the event loop only."""

    def __init__(self, max_rows: int, max_queue: int, retry_after_s: int = 2) -> None:
        self.capacity = max_rows + max_queue
        self.num_live = 0
        self.is_draining = False
        self._headers = {"Retry-After": str(retry_after_s)}

    def enter(self, num_places: int) -> Ticket:
        """Take places, or raise: 503 while shutting down, 400 if they never fit, 429 if they do not now."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", headers=self._headers)
        if num_places > self.capacity:
            raise ApiError(
                400, f"this request needs {num_places} answers at once and the server takes {self.capacity}"
            )
        if self.num_live + num_places > self.capacity:
            raise ApiError(
                429,
                f"the server is busy: {self.num_live} requests run or wait. Try again later.",
                code="rate_limit_exceeded",
                headers=self._headers,
            )
        self.num_live += num_places
        return Ticket(self, num_places)

    def drain(self) -> None:
        """Let nobody in any more."""
        self.is_draining = True
