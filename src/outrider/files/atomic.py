"""Files and folders that appear whole or not at all.

A writer fills a temporary file or folder beside the target, brings its bytes to the disk and renames it.
A reader never gets a half-written target. An older target stays until the new one is complete.

    .outrider-writing-XXXX    a file that is being written; the writer holds a lock on it
    .NAME.part-XXXX/          a folder that is being built; the builder holds the lock on .NAME.lock

The kernel releases a lock when its process ends, so a file without a lock was abandoned.
Must not import mlx: cpu/blas.py runs before mlx is imported.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

TEMPORARY = ".outrider-writing-"


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends, and is removed when the block raises.

    The umask is taken off its `mode`.
    """
    with _new_temporary(path, mode) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _new_temporary(path: Path, mode: int) -> BinaryIO:
    """A new file beside `path`, locked."""
    while True:
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        file = open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
        with suppress(OSError):  # a file system without locks: no process removes the file there either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink > 0:
            return file
        file.close()  # another process found it without its lock, and has removed it


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode())


def remove_if_abandoned(temporary: Path) -> bool:
    """Remove a temporary file of atomic_file if the process that wrote it has ended."""
    try:
        with open(temporary, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()
            return True
    except OSError:  # the writer is alive, or the file is gone, or this user may not remove it
        return False


def build_folder(target: Path, build: Callable[[Path], None], is_usable: Callable[[Path], bool]) -> None:
    """Make the folder `target` by `build(work folder)` unless a usable one is there. Raises OSError.

    If several processes need the folder at once, one builds it and the others wait.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f".{target.name}.lock"), "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("another process is preparing %s; waiting for that process", target.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if is_usable(target):
            return
        # This process holds the lock: every part folder belongs to a process that was killed.
        for leftover in target.parent.glob(f".{target.name}.part-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        _build(target, build)


def _build(target: Path, build: Callable[[Path], None]) -> None:
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        work = part / "folder"
        work.mkdir()
        build(work)
        for path in (*work.rglob("*"), work):
            _bring_to_disk(path)  # else a power cut after the rename could leave empty files
        if target.exists():  # not usable: damaged, or in an older format
            os.rename(target, part / "replaced")
        os.rename(work, target)
        _bring_to_disk(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _bring_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
