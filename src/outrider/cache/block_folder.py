"""A folder of block files, bounded in bytes: the least recently used go first. No MLX, no threads of its own.

    FOLDER/<model>-<name>.block.safetensors

`model` stands for the weights of the model and its head, `name` for all tokens up to the block's end and for
who may find it. Any number of servers, of any models, may share a folder: a file may come and go at any time,
and the bound is for all of them together. Nothing but files named like this is ever touched.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from outrider.cache.block_file import Arrays, read_block_file, write_block_file
from outrider.files.atomic import TEMPORARY, remove_if_abandoned

log = logging.getLogger(__name__)

SUFFIX = ".block.safetensors"
HEADER_BYTES = 64 << 10  # more than a header takes
RESCAN_EVERY = 16  # writes after which the folder is looked at again: others may have written too
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
OURS = re.compile(r"[0-9a-f]+-[0-9a-z-]+" + re.escape(SUFFIX))


class BlockFolder:
    """Knows which files there are. `has` and `num_bytes` may be asked on any thread."""

    def __init__(
        self, folder: Path, fingerprint: str, budget_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises OSError when there can be no such folder."""
        self.folder = folder
        self.num_evicted = 0
        self._fingerprint = fingerprint
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._newest_s = 0.0  # no file's last use is after this
        self._num_written = 0
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # by file name, least recently used first
        self._num_bytes = 0
        self.is_read_only = not self._prepare()
        self._rescan()
        self._make_room(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all models' files, as far as this process knows."""
        with self._lock:
            return self._num_bytes

    def has(self, name: str) -> bool:
        with self._lock:
            if self._file_name(name) in self._sizes:
                return True
        return self.path(name).exists()  # another server's

    def path(self, name: str) -> Path:
        return self.folder / self._file_name(name)

    def write(self, name: str, arrays: Arrays) -> bool:
        """False when it would never fit. Raises OSError."""
        num_bytes = sum(array.data.nbytes for array in arrays.values())
        if not self._make_room(num_bytes + HEADER_BYTES):
            return False
        size = write_block_file(self.path(name), self._labels(name), arrays)
        self._used(self._file_name(name), size)
        self._num_written += 1
        if self._num_written % RESCAN_EVERY == 0:
            self._rescan()
            self._make_room(0)
        return True

    def read(self, name: str) -> Arrays:
        """Raises OSError, or BadFile for a file that must not be served."""
        try:
            arrays = read_block_file(self.path(name), self._labels(name))
        except OSError:
            self._forget(self._file_name(name))
            raise
        self._used(self._file_name(name), self.path(name).stat().st_size)
        return arrays

    def remove(self, name: str) -> None:
        self._remove_file(self._file_name(name))

    def remove_all(self) -> None:
        """All files of this model."""
        self._rescan()
        with self._lock:
            own = [file_name for file_name in self._sizes if file_name.startswith(f"{self._fingerprint}-")]
        for file_name in own:
            self._remove_file(file_name)

    def _file_name(self, name: str) -> str:
        return f"{self._fingerprint}-{name}{SUFFIX}"

    def _labels(self, name: str) -> dict[str, str]:
        return {"fingerprint": self._fingerprint, "name": name}

    def _prepare(self) -> bool:
        """Whether files can be written there."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are nobody else's business
            probe = self.folder / f"{TEMPORARY}{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return True  # for now; each write will say so
            if error.errno not in READ_ONLY:
                raise
            log.warning(
                "prefix cache: %s is read-only (%s): its blocks are used, none is added",
                self.folder, error.strerror,
            )  # fmt: skip
            return False
        return True

    def _rescan(self) -> None:
        """Learn what is there, oldest first, and clean up after processes that were killed."""
        found: list[tuple[float, str, int]] = []
        try:
            for entry in os.scandir(self.folder):
                if entry.name.startswith(TEMPORARY):
                    remove_if_abandoned(Path(entry.path))
                elif OURS.fullmatch(entry.name):
                    found += _stat(entry)
        except OSError as error:
            log.warning("prefix cache: cannot list %s (%s)", self.folder, error.strerror)
            return
        found.sort()
        with self._lock:
            self._sizes = {name: size for _, name, size in found}
            self._num_bytes = sum(self._sizes.values())
        self._newest_s = max([self._newest_s, *(mtime for mtime, _, _ in found[-1:])])

    def _make_room(self, num_bytes: int) -> bool:
        if num_bytes > self._budget_bytes:
            return False
        while not self.is_read_only and self.num_bytes + num_bytes > self._budget_bytes:
            with self._lock:
                oldest = next(iter(self._sizes))
            self._remove_file(oldest)
            self.num_evicted += 1
        return True

    def _used(self, file_name: str, size: int) -> None:
        """Last in line. The time only orders files: it goes forward even where the clock goes back."""
        with self._lock:
            self._num_bytes += size - self._sizes.pop(file_name, 0)
            self._sizes[file_name] = size
        self._newest_s = max(self._clock(), self._newest_s + 0.01)
        try:
            os.utime(self.folder / file_name, (self._newest_s, self._newest_s))
        except OSError:
            return  # gone, or read-only: then the order is this process's own

    def _forget(self, file_name: str) -> None:
        with self._lock:
            self._num_bytes -= self._sizes.pop(file_name, 0)

    def _remove_file(self, file_name: str) -> None:
        self._forget(file_name)
        try:
            (self.folder / file_name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("prefix cache: cannot remove %s (%s)", self.folder / file_name, error.strerror)


def _stat(entry: os.DirEntry[str]) -> list[tuple[float, str, int]]:
    try:
        stat = entry.stat()
    except FileNotFoundError:  # another server has just removed it
        return []
    return [(stat.st_mtime, entry.name, stat.st_size)]
