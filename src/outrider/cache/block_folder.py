"""A folder of block files with a limit in bytes. The least recently used files are removed first. No MLX.

    FOLDER/<model>-<name>.block.safetensors
    FOLDER/checksum.key                          the key of all checksums, made by the first server

`model` is a fingerprint of the weights of the model and its head. `name` is a digest of the tree's name and
of all tokens up to the block's end. Several servers, of any models, may share a folder: a file may appear
and disappear at any time, and the limit holds for all servers together. Files with other names are never
touched.

Only the server's own user may write to the folder: who changes a block changes the answers that use it. The
key makes blocks that come from elsewhere, such as a copied folder, unusable too.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import stat
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from outrider.cache.block_file import Arrays, read_block_file, write_block_file
from outrider.files.atomic import TEMPORARY, remove_if_abandoned
from outrider.files.private import KEY_BYTES, may_others_read, refuse_if_others_may_write, secret_key

log = logging.getLogger(__name__)

SUFFIX = ".block.safetensors"
KEY_FILE = "checksum.key"
HEADER_BYTES = 64 << 10  # upper limit for a block's header, which is not made yet when room is made
RESCAN_EVERY = 16  # writes between two scans of the folder, for files of other servers; chosen by hand
READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)
BLOCK_FILE_NAME = re.compile(r"[0-9a-f]+-[0-9a-z-]+" + re.escape(SUFFIX))


class BlockFolder:
    """Knows the files of the folder. `has` and `num_bytes` may be called from any thread."""

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
        self._num_written = 0
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # by file name, least recently used first
        self._num_bytes = 0
        self.is_read_only = not self._prepare()
        self._key = self._read_key()
        self._rescan()
        self._make_room(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all models' files, as of this process's last scan and its own writes since."""
        with self._lock:
            return self._num_bytes

    def has(self, name: str) -> bool:
        with self._lock:
            if self._file_name(name) in self._sizes:
                return True
        try:
            return stat.S_ISREG(os.lstat(self.path(name)).st_mode)  # another server may have written it
        except OSError:
            return False

    def path(self, name: str) -> Path:
        return self.folder / self._file_name(name)

    def write(self, name: str, arrays: Arrays) -> bool:
        """Write a block. False if it is larger than the limit. Raise OSError if the disk refuses it."""
        num_bytes = sum(array.data.nbytes for array in arrays.values())
        if not self._make_room(num_bytes + HEADER_BYTES):
            return False
        size = write_block_file(self.path(name), self._labels(name), arrays, self._key)
        self._used(self._file_name(name), size)
        self._num_written += 1
        if self._num_written % RESCAN_EVERY == 0:
            self._rescan()
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

    def _rescan(self) -> None:
        """List the folder, oldest files first, and remove temporary files of processes that were killed."""
        found: list[tuple[float, str, int]] = []
        try:
            for entry in os.scandir(self.folder):
                if entry.name.startswith(TEMPORARY):
                    remove_if_abandoned(Path(entry.path))
                elif BLOCK_FILE_NAME.fullmatch(entry.name):
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
        """Mark a file as used last. Times only order the files: they grow even if the clock goes back."""
        with self._lock:
            self._num_bytes += size - self._sizes.pop(file_name, 0)
            self._sizes[file_name] = size
        self._newest_s = max(self._clock(), self._newest_s + 0.01)
        try:
            os.utime(self.folder / file_name, (self._newest_s, self._newest_s))
        except OSError:
            return  # gone, or read-only: then only this process knows the order

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
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # another server has removed it
        return []
    return [(found.st_mtime, entry.name, found.st_size)] if stat.S_ISREG(found.st_mode) else []
