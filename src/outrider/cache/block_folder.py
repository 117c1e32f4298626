"""A folder of block files with a limit in bytes. The least recently used files are removed first. No MLX.

No write lists the whole folder: each looks at the next few entries, in turn, to find files that other servers
have added or removed.

    FOLDER/<model>-<name>.block.safetensors
    FOLDER/checksum.key                          the key of all checksums, made by the first server

`model` is a fingerprint of the weights of the model and its head. `name` is a digest of the tree's name and
of all tokens up to the block's end. Several servers, of any models, may share a folder: a file may appear
and disappear at any time, and the limit holds for all servers together, except for what the others write
until this server has looked at the whole folder. Files with other names are never touched.

Only the server's own user may write to the folder: who changes a block changes the answers that use it. The
key makes blocks that come from elsewhere, such as a copied folder, unusable too.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import re
import secrets
import stat
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from outrider.cache.block_file import Arrays, read_block_file, write_block_file
from outrider.files.atomic import TEMPORARY, remove_if_abandoned
from outrider.files.private import KEY_BYTES, may_others_read, refuse_if_others_may_write, secret_key

log = logging.getLogger(__name__)

SUFFIX = ".block.safetensors"
KEY_FILE = "checksum.key"
HEADER_BYTES = 64 << 10  # upper limit for a block's header, which is not made yet when room is made
# Entries of the folder that each write looks at. Chosen by hand: of the servers that share a folder, the one
# that writes most often misses at most 1/64 of the folder of each other one's files. Measured: 0.4 ms.
ENTRIES_PER_WRITE = 64
# Files of all models together. Chosen by hand: a file takes 0.3 KB, and 7 us at the start (measured).
# Most models have blocks of 1 MB or more, and reach the limit in bytes first.
MAX_FILES = 200_000
REMOVED_AT_ONCE = 64  # files that `remove_all` removes between two pauses; chosen by hand
PAUSE_S = 0.001  # in which other threads run; chosen by hand
READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)
BLOCK_FILE_NAME = re.compile(r"[0-9a-f]+-[0-9a-z-]+" + re.escape(SUFFIX))


@dataclass(slots=True)
class _File:
    size: int
    used_s: float  # by any server, as far as this one knows
    scan: int  # the last scan of the folder in which the file was there


class BlockFolder:
    """Knows the files of the folder. For one thread, but any thread may call `has` and `num_bytes`."""

    def __init__(
        self, folder: Path, fingerprint: str, budget_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Raise OSError if the folder cannot be made or read, or if other users may write to it."""
        self.folder = folder
        self.num_evicted = 0
        self._fingerprint = fingerprint
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._newest_s = 0.0  # the latest use of any file
        self._files: dict[str, _File] = {}  # by file name
        self._num_bytes = 0
        # A heap of (time, file name). Each file has an entry with the time of its last use or an earlier one.
        # Files that are gone may have entries too.
        self._by_use: list[tuple[float, str]] = []
        self._entries: Any = None  # of the scan that is under way: an iterator of os.scandir
        self._num_scans = 0
        self.is_read_only = not self._prepare()
        self._key = self._read_key()
        self._scan(sys.maxsize)
        self._make_room(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all models' files, as far as this process knows."""
        return self._num_bytes

    def has(self, name: str) -> bool:
        file_name = self._file_name(name)
        return file_name in self._files or self._is_file(file_name)  # another server may have written it

    def path(self, name: str) -> Path:
        return self.folder / self._file_name(name)

    def write(self, name: str, arrays: Arrays) -> bool:
        """Write a block. False if it is larger than the limit. Raise OSError if the disk refuses it."""
        num_bytes = sum(array.data.nbytes for array in arrays.values())
        if not self._make_room(num_bytes + HEADER_BYTES):
            return False
        size = write_block_file(self.path(name), self._labels(name), arrays, self._key)
        self._used(self._file_name(name), size)
        self._scan(ENTRIES_PER_WRITE)
        self._make_room(0)
        return True

    def read(self, name: str) -> Arrays:
        """Read a block. Raise OSError, or BadFile for a damaged or foreign file."""
        try:
            arrays = read_block_file(self.path(name), self._labels(name), self._key)
        except OSError:
            self._forget(self._file_name(name))
            raise
        self._used(self._file_name(name), self.path(name).stat().st_size)
        return arrays

    def remove(self, name: str) -> None:
        self._remove_file(self._file_name(name))

    def remove_all(self) -> None:
        """Remove all files of this model."""
        try:
            with os.scandir(self.folder) as entries:
                names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        except OSError as error:
            self._cannot_list(error)
            return
        own = [name for name in names if name.startswith(f"{self._fingerprint}-")]
        for i, name in enumerate(filter(BLOCK_FILE_NAME.fullmatch, own)):
            if i % REMOVED_AT_ONCE == 0:
                time.sleep(PAUSE_S)
            self._remove_file(name)
        self._drop_entries_of_missing()

    def close(self) -> None:
        """End the scan that is under way."""
        if self._entries is not None:
            self._entries.close()
            self._entries = None

    def _file_name(self, name: str) -> str:
        return f"{self._fingerprint}-{name}{SUFFIX}"

    def _labels(self, name: str) -> dict[str, str]:
        return {"fingerprint": self._fingerprint, "name": name}

    def _prepare(self) -> bool:
        """Make the folder. False if files cannot be written there."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts are private
        self._check_access()
        try:
            probe = self.folder / f"{TEMPORARY}{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return True  # the disk is full now; later writes may succeed
            if error.errno not in READ_ONLY_ERRORS:
                raise
            log.warning(
                "prefix cache: %s is read-only (%s): blocks are read from it, but none is added",
                self.folder, error.strerror,
            )  # fmt: skip
            return False
        return True

    def _check_access(self) -> None:
        found = self.folder.stat()
        refuse_if_others_may_write(self.folder, found)
        if may_others_read(found):
            log.warning(
                "prefix cache: other users may list the files in %s; chmod 700 prevents this", self.folder
            )

    def _read_key(self) -> bytes:
        try:
            return secret_key(self.folder / KEY_FILE, may_create=not self.is_read_only)
        except OSError as error:
            if not (self.is_read_only and error.errno == errno.ENOENT) and error.errno != errno.ENOSPC:
                raise
            log.warning(
                "prefix cache: no key can be stored in %s (%s): blocks of other runs are not used",
                self.folder, error.strerror,
            )  # fmt: skip
            return secrets.token_bytes(KEY_BYTES)

    # -- the scan ----------------------------------------------------------------------------------------

    def _scan(self, num_entries: int) -> None:
        """Look at the next entries of the folder. After the last one, the next call starts again."""
        try:
            if self._entries is None:
                self._entries = os.scandir(self.folder)
                self._num_scans += 1
            num_seen = 0
            for entry in islice(self._entries, num_entries):
                self._look_at(entry)
                num_seen += 1
        except OSError as error:
            self._cannot_list(error)
            self.close()
            return
        if num_seen < num_entries:
            self.close()
            self._forget_missing()

    def _look_at(self, entry: os.DirEntry[str]) -> None:
        """Note a block file. Remove a temporary file of a process that was killed."""
        if entry.name.startswith(TEMPORARY):
            remove_if_abandoned(Path(entry.path))
        elif BLOCK_FILE_NAME.fullmatch(entry.name):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # another server has removed it
                return
            if stat.S_ISREG(found.st_mode):
                self._note(entry.name, found.st_size, found.st_mtime)

    def _forget_missing(self) -> None:
        """After a scan: forget the files that it has not found."""
        unseen = [name for name, file in self._files.items() if file.scan < self._num_scans]
        for name in unseen:
            if not self._is_file(name):  # some file systems skip entries while others are removed
                self._forget(name)
        self._drop_entries_of_missing()

    def _cannot_list(self, error: OSError) -> None:
        log.warning("prefix cache: cannot list %s (%s)", self.folder, error.strerror)

    # -- files and their order ---------------------------------------------------------------------------

    def _make_room(self, num_bytes: int) -> bool:
        if num_bytes > self._budget_bytes:
            return False
        if self.is_read_only:
            return True
        while self._num_bytes + num_bytes > self._budget_bytes or len(self._files) >= MAX_FILES:
            self._remove_file(self._least_recently_used())
            self.num_evicted += 1
        return True

    def _least_recently_used(self) -> str:
        while True:
            used_s, file_name = heapq.heappop(self._by_use)
            file = self._files.get(file_name)
            if file is None:
                continue  # it is gone
            file.used_s = max(file.used_s, self._time_on_disk(file_name))  # another server may have used it
            if file.used_s <= used_s:
                return file_name
            heapq.heappush(self._by_use, (file.used_s, file_name))

    def _used(self, file_name: str, size: int) -> None:
        """Mark a file as used last. Times only order the files: they grow even if the clock goes back."""
        self._note(file_name, size, max(self._clock(), self._newest_s + 0.01))
        try:
            os.utime(self.folder / file_name, (self._newest_s, self._newest_s))
        except OSError:
            return  # gone, or read-only: then only this process knows the order

    def _note(self, file_name: str, size: int, used_s: float) -> None:
        """Note that a file is there."""
        file = self._files.get(file_name)
        if file is None:
            file = self._files[file_name] = _File(0, used_s, self._num_scans)
            heapq.heappush(self._by_use, (used_s, file_name))
        self._num_bytes += size - file.size
        file.size, file.used_s, file.scan = size, max(file.used_s, used_s), self._num_scans
        self._newest_s = max(self._newest_s, used_s)

    def _forget(self, file_name: str) -> None:
        file = self._files.pop(file_name, None)
        if file is not None:
            self._num_bytes -= file.size

    def _remove_file(self, file_name: str) -> None:
        self._forget(file_name)
        try:
            (self.folder / file_name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("prefix cache: cannot remove %s (%s)", self.folder / file_name, error.strerror)

    def _drop_entries_of_missing(self) -> None:
        """Bound the heap: files may come and go without ever being its oldest."""
        if len(self._by_use) > 2 * len(self._files) + ENTRIES_PER_WRITE:
            self._by_use = [(file.used_s, name) for name, file in self._files.items()]
            heapq.heapify(self._by_use)

    def _is_file(self, file_name: str) -> bool:
        try:
            return stat.S_ISREG(os.lstat(self.folder / file_name).st_mode)
        except OSError:
            return False

    def _time_on_disk(self, file_name: str) -> float:
        try:
            return os.lstat(self.folder / file_name).st_mtime
        except OSError:  # another server has removed it
            return 0.0
