"""Where Outrider keeps models on this machine, and how a folder gets there whole or not at all.

Owns the cache's places, its lock and the atomic step from "being built" to "there".
Must not know what a model folder contains.

    models/
      .NAME.lock          held while somebody builds NAME; released by the kernel when that process ends
      .NAME.part-XXXX/    being built; what a killed process left behind is removed by the next builder
      NAME/               complete: it appears by one rename
"""

import errno
import fcntl
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.models.errors import ModelUnavailable

log = logging.getLogger(__name__)

READ_ONLY_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder() -> Path:
    """`$OUTRIDER_CACHE`, else the platform's place for caches."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "outrider"


def models_folder() -> Path:
    return cache_folder() / "models"


def build_once(
    target: Path, build: Callable[[Path], None], is_usable: Callable[[Path], bool] = Path.is_dir
) -> Path:
    """Return `target`, made by `build(work folder)` if there is no usable one yet.

    Of several processes that ask at once, one builds and the others wait for it.
    """
    if is_usable(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if not is_usable(target):
                _remove_leftovers(target)
                _build(target, build)
    except OSError as error:
        raise ModelUnavailable(_storage_message(error, target.parent)) from error
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning(
                "another process is preparing %s; waiting for it", path.name[1:].removesuffix(".lock")
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_leftovers(target: Path) -> None:
    """Under the lock, nobody is building: every part folder belongs to a process that was killed."""
    for leftover in target.parent.glob(f".{target.name}.part-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _build(target: Path, build: Callable[[Path], None]) -> None:
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        work = part / "folder"
        work.mkdir()
        build(work)
        _flush(work)
        if target.exists():  # an unusable one: damaged, or of an older format
            os.rename(target, part / "replaced")
        os.rename(work, target)
        _flush_entry(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Bring the folder's files to the disk, so that a power cut after the rename cannot empty them."""
    for path in folder.rglob("*"):
        _flush_entry(path)
    _flush_entry(folder)


def _flush_entry(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _storage_message(error: OSError, folder: Path) -> str:
    if error.errno in FULL_DISK_ERRORS:
        return (
            f"The disk that holds {folder} is full. Free some space, or set OUTRIDER_CACHE to another folder."
        )
    if error.errno in READ_ONLY_ERRORS:
        return (
            f"{folder} cannot be written to. Change its permissions, or set OUTRIDER_CACHE to another folder."
        )
    return f"Cannot store a model in {folder}: {error}. Set OUTRIDER_CACHE to use another folder."
