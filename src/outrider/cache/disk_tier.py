"""The prefix cache's second tier: a thread that writes blocks to a folder and reads them back. No MLX.

The engine thread hands over plain host arrays and never waits for the disk. A failure is logged and costs a
recomputation, never an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cache.block_file import Arrays, BadFile, check_finite
from outrider.cache.block_folder import BlockFolder

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 << 20  # of blocks that wait to be written; more are skipped; chosen by hand
RETRY_AFTER_S = 30.0  # seconds without writes after a write that failed; chosen by hand


@dataclass(frozen=True)
class FetchedFile:
    """A file that was read."""

    name: str
    arrays: Arrays | None  # None: the file is missing or damaged


@dataclass
class DiskCounts:
    """Blocks, since the start."""

    written: int = 0
    read: int = 0
    refused: int = 0  # damaged or foreign files, which were removed
    failed: int = 0  # failed writes
    skipped: int = 0  # not written: queue full, after a failed write, or folder read-only


class DiskTier:
    def __init__(self, folder: BlockFolder, queue_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.folder = folder
        self.counts = DiskCounts()
        self._queue_bytes = queue_bytes
        self._no_writes_until_s = 0.0
        self._lock = threading.Condition()
        self._to_read: deque[str] = deque()
        self._to_remove: deque[str] = deque()
        self._to_write: deque[tuple[str, Arrays]] = deque()
        self._queued: dict[str, int] = {}  # bytes of the blocks in `_to_write`, by name
        self._num_queued_bytes = 0  # their sum
        self._fetched: list[FetchedFile] = []
        self._is_clearing = self._is_busy = self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="outrider-prefix-disk", daemon=True)
        self._thread.start()

    # -- for the engine thread ---------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        return self.folder.has(name)

    def write(self, name: str, arrays: Arrays) -> bool:
        """Queue a block for writing. False if the block is skipped."""
        num_bytes = sum(array.data.nbytes for array in arrays.values())
        with self._lock:
            is_off = self.folder.is_read_only or self._is_closed or time.monotonic() < self._no_writes_until_s
            if is_off or self._num_queued_bytes + num_bytes > self._queue_bytes:
                self.counts.skipped += 1
                return False
            if name not in self._queued:
                self._queued[name] = num_bytes
                self._num_queued_bytes += num_bytes
                self._to_write.append((name, arrays))
                self._lock.notify_all()
        return True

    def fetch(self, name: str) -> None:
        """Request a file. `take_fetched` will return it, usable or not. Reads come before writes."""
        with self._lock:
            self._to_read.append(name)
            self._lock.notify_all()

    def take_fetched(self) -> list[FetchedFile]:
        with self._lock:
            fetched, self._fetched = self._fetched, []
        return fetched

    def wait_for_fetched(self, timeout_s: float) -> None:
        """Wait until a file was read, or for `timeout_s`."""
        with self._lock:
            self._lock.wait_for(lambda: bool(self._fetched), timeout_s)

    def read_now(self, names: Sequence[str], timeout_s: float) -> dict[str, Arrays | None]:
        """Read files, and wait for that. None: missing, damaged, or not read within `timeout_s`.

        Not together with `fetch`. Queued blocks of these names are written first.
        """
        give_up_s = time.monotonic() + timeout_s
        with self._lock:
            self._lock.wait_for(lambda: not any(name in self._queued for name in names), timeout_s)
        for name in names:
            self.fetch(name)
        found: dict[str, Arrays | None] = {}
        while not found.keys() >= {*names} and (left_s := give_up_s - time.monotonic()) > 0:
            self.wait_for_fetched(left_s)
            found |= {file.name: file.arrays for file in self.take_fetched()}
        return {name: found.get(name) for name in names}

    def remove(self, name: str) -> None:
        """Remove a file soon."""
        with self._lock:
            self._to_remove.append(name)
            self._lock.notify_all()

    def clear(self) -> None:
        """Remove this model's files and forget the queued blocks."""
        with self._lock:
            self._to_write.clear()
            self._queued.clear()
            self._num_queued_bytes = 0
            self._is_clearing = True
            self._lock.notify_all()

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all reads and writes are done. False if that takes longer than `timeout_s`."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._has_work and not self._is_busy, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write the queued blocks, for `timeout_s` at most, and end the thread."""
        if not self.flush(timeout_s):
            log.warning("prefix cache: %d blocks were not written in time", len(self._queued))
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._thread.join(timeout_s)

    # -- on the disk thread ------------------------------------------------------------------------------

    @property
    def _has_work(self) -> bool:
        return bool(self._to_remove or self._to_read or self._to_write or self._is_clearing)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._has_work or self._is_closed)
                if self._is_closed:
                    self.folder.close()
                    return
                self._is_busy = True
            try:
                self._do_next()
            except Exception:  # no other thread would do its work
                log.exception("prefix cache: an error in the disk thread, which goes on")
            with self._lock:
                self._is_busy = False
                self._lock.notify_all()

    def _do_next(self) -> None:
        with self._lock:
            removed = [*self._to_remove]
            self._to_remove.clear()
            is_clearing, self._is_clearing = self._is_clearing, False
            read = self._to_read.popleft() if self._to_read and not is_clearing else None
            write = self._to_write.popleft() if self._to_write and not is_clearing and read is None else None
        for name in removed:
            self.folder.remove(name)
        if is_clearing:
            self.folder.remove_all()
        elif read is not None:
            self._read(read)
        elif write is not None:
            self._write(*write)

    def _write(self, name: str, arrays: Arrays) -> None:
        try:
            check_finite(arrays)
            if self.folder.write(name, arrays):
                self.counts.written += 1
            else:
                self.counts.skipped += 1
        except BadFile as error:
            log.warning("prefix cache: a block is not written: %s", error)
            self.counts.failed += 1
        except OSError as error:
            log.warning(
                "prefix cache: cannot write to %s (%s); trying again in %.0f s",
                self.folder.folder, error.strerror or error, RETRY_AFTER_S,
            )  # fmt: skip
            self.counts.failed += 1
            self._no_writes_until_s = time.monotonic() + RETRY_AFTER_S
        finally:
            with self._lock:
                self._num_queued_bytes -= self._queued.pop(name, 0)

    def _read(self, name: str) -> None:
        arrays = None
        try:
            arrays = self.folder.read(name)
            self.counts.read += 1
        except FileNotFoundError:
            pass  # another server has removed the file
        except BadFile as error:
            log.warning("prefix cache: %s is removed: %s", self.folder.path(name), error)
            self.counts.refused += 1
            self.folder.remove(name)
        except OSError as error:
            log.warning("prefix cache: cannot read %s (%s)", self.folder.path(name), error.strerror or error)
        with self._lock:
            self._fetched.append(FetchedFile(name, arrays))
            self._lock.notify_all()
