"""The peak memory of another process and its children during a round (Linux only)."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.05  # seconds between two looks; chosen by hand
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryWatch:
    """Reads the memory of a process again and again, on a thread of its own, and stores the highest value."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._peak = 0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def works(self) -> bool:
        return resident_bytes(self.pid) > 0

    def reset(self) -> None:
        self._peak = resident_bytes(self.pid)
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="outrider-bench-memory", daemon=True)
            self._thread.start()

    def peak_bytes(self) -> int | None:
        self._peak = max(self._peak, resident_bytes(self.pid))
        return self._peak or None

    def close(self) -> None:
        self._done.set()

    def _poll(self) -> None:
        while not self._done.wait(POLL_S):
            self._peak = max(self._peak, resident_bytes(self.pid))


def resident_bytes(pid: int) -> int:
    """Of the process and its descendants; 0 if unknown."""
    return sum(_resident_bytes(one) for one in _family(pid))


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = children.read_text().split()
        except OSError:
            continue
        for child in found:
            yield from _family(int(child))
