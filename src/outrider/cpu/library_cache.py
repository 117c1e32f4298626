"""Shared libraries that are built once, at first use, and stored in the user's cache folder.

A file's name contains a hash of what the library was built from and a hash of the library itself. A file
whose content does not match its name is ignored and built again.

Nothing here may import mlx: cpu/blas.py has to run first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from outrider.files.atomic import TEMPORARY, atomic_file, remove_if_abandoned
from outrider.files.cache_folder import cache_folder

log = logging.getLogger("outrider.cpu.blas")

MAX_UNUSED_S = 30 * 24 * 3600  # seconds after which a library that no process has used is removed
BUILD_TIMEOUT_S = 30  # seconds; `import outrider` waits for the build. Chosen by hand

Loaded = TypeVar("Loaded")


class Unusable(Exception):
    """A library cannot be used, and building it again would not help; the message gives the reason."""


@dataclass(frozen=True)
class Recipe:
    """How to build a library."""

    # The first part of the file name; changes with everything that the library is built from. A stored one
    # whose name goes on after it serves as well.
    stem: str
    make: Callable[[Path], None]  # writes the library; raises Unusable or OSError if that fails


def load_cached(recipe: Recipe, load: Callable[[str], Loaded]) -> tuple[Loaded, bool]:
    """The result of `load` for the library, and True if the library is in the cache folder now.

    The library is built if the folder has none, or if `load` cannot open it. Without a usable folder the
    library is built for this process only.
    """
    for library in _cached(recipe.stem):
        with suppress(OSError):
            loaded = load(str(library))
            with suppress(OSError):  # the folder may be read-only
                os.utime(library)  # when it was last used
            return loaded, True
    with tempfile.TemporaryDirectory(prefix="outrider-blas-") as temporary:  # the mapping outlives the file
        draft = Path(temporary, "draft.so")
        recipe.make(draft)
        try:
            library = _store(draft, recipe.stem)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            log.warning("BLAS: %s cannot be stored: %s", recipe.stem, error)
            return load(str(draft)), False
        return load(str(library)), True


def failure_of(command: Sequence[str], timeout_s: float = BUILD_TIMEOUT_S) -> str:
    """Run a build program. Returns "" or why it failed; raises Unusable if it takes too long."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return f"cannot be run: {error}"
    with process:
        try:
            stderr = process.communicate(timeout=timeout_s)[1]
        except subprocess.TimeoutExpired:
            raise Unusable(f"{command[0]} took longer than {timeout_s} s") from None
        finally:
            if process.returncode is None:  # still running, so the process id is still its own
                os.killpg(process.pid, signal.SIGKILL)
    return f"failed ({process.returncode}): {stderr.strip()[:200]}" if process.returncode else ""


# The folder -------------------------------------------------------------------------------------------------


def _trusted_folder() -> Path:
    """The folder of libraries, made if it is missing. OSError: its libraries cannot or must not be opened."""
    folder = cache_folder() / "blas"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()):
        raise OSError(f"{folder} belongs to another user")
    if status.st_mode & 0o022:
        raise OSError(f"others may write to {folder} (chmod 700 mends that)")
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise OSError(f"{folder} is mounted noexec")
    return folder


def _cached(stem: str) -> Iterator[Path]:
    """Libraries of this user or root that match their file name. Opening a truncated one could crash."""
    with suppress(OSError, RuntimeError):
        for library in _trusted_folder().glob(f"{stem}-*.so"):
            with suppress(OSError):
                is_ours = library.stat().st_uid in (0, os.getuid())
                if is_ours and library.name.endswith(f"-{_fingerprint(library)}.so"):
                    yield library


def _store(draft: Path, stem: str) -> Path:
    """Copy the library into the folder. Other processes may do the same at the same time."""
    folder = _trusted_folder()
    for temporary in folder.glob(f"{TEMPORARY}*"):
        remove_if_abandoned(temporary)
    _remove_unused(folder)
    library = folder / f"{stem}-{_fingerprint(draft)}.so"
    with open(draft, "rb") as source, atomic_file(library) as file:
        shutil.copyfileobj(source, file)
    return library


def _remove_unused(folder: Path) -> None:
    """Remove the libraries of earlier versions. A process that still has one open keeps it."""
    for library in folder.glob("*.so"):
        with suppress(OSError):
            if time.time() - library.stat().st_mtime > MAX_UNUSED_S:
                library.unlink()


def _fingerprint(library: Path) -> str:
    """A hash of the first megabyte (of a large library: headers and symbols), and the size."""
    with library.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 20)).hexdigest()
        return f"{digest[:12]}-{os.fstat(file.fileno()).st_size}"
