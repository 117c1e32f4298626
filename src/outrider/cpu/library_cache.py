"""Shared libraries that are made once, at first use, and kept in the user's cache folder.

A file's name says what the library was made from and what came of it, so a kept file is either what was made
or not looked at: what `load` thinks of it stands until one of the two changes.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from outrider.files.atomic import TEMPORARY, atomic_file, remove_if_abandoned
from outrider.files.cache_folder import cache_folder

log = logging.getLogger("outrider.cpu.blas")

PATIENCE_S = 30  # with a program that makes a library: an import waits for it

Loaded = TypeVar("Loaded")


class Unusable(Exception):
    """A library that cannot serve, however often it is made; the text says why."""


@dataclass(frozen=True)
class Recipe:
    """How to make a library: what its file is called after, and what writes it."""

    stem: str  # changes with everything that goes into the library
    make: Callable[[Path], None]  # writes the library; Unusable or OSError where that fails


def load_kept(recipe: Recipe, load: Callable[[str], Loaded]) -> tuple[Loaded, bool]:
    """What `load` makes of the kept library, and whether it is kept now.

    It is made where it is missing, damaged, of other ingredients or cannot be opened; for this process only,
    where there is no folder to keep it in. It is never made twice.
    """
    for library in _kept(recipe.stem):
        with suppress(OSError):
            return load(str(library)), True
    with tempfile.TemporaryDirectory(prefix="outrider-blas-") as temporary:  # the mapping outlives the file
        draft = Path(temporary, "draft.so")
        recipe.make(draft)
        try:
            library = _keep(draft, recipe.stem)
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
            log.warning("BLAS: %s cannot be kept: %s", recipe.stem, error)
            return load(str(draft)), False
        return load(str(library)), True


def failure_of(command: Sequence[str]) -> str:
    """Run a program that makes a library; empty where it succeeds. Unusable where it takes too long."""
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
            complaint = process.communicate(timeout=PATIENCE_S)[1]
        except subprocess.TimeoutExpired:
            raise Unusable(f"{command[0]} took longer than {PATIENCE_S} s") from None
        finally:
            if process.returncode is None:  # nobody has waited for it: the number is still its own
                os.killpg(process.pid, signal.SIGKILL)
    return f"failed ({process.returncode}): {complaint.strip()[:200]}" if process.returncode else ""


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


def _kept(stem: str) -> Iterator[Path]:
    """Libraries that are what their name says (opening a cut one could crash), written by us or by root."""
    with suppress(OSError, RuntimeError):
        for library in _trusted_folder().glob(f"{stem}-*.so"):
            with suppress(OSError):
                is_ours = library.stat().st_uid in (0, os.getuid())
                if is_ours and library.name == f"{stem}-{_fingerprint(library)}.so":
                    yield library


def _keep(draft: Path, stem: str) -> Path:
    """Copy the library into the folder. Other processes may do the same at the same time."""
    folder = _trusted_folder()
    for temporary in folder.glob(f"{TEMPORARY}*"):
        remove_if_abandoned(temporary)
    library = folder / f"{stem}-{_fingerprint(draft)}.so"
    with open(draft, "rb") as source, atomic_file(library) as file:
        shutil.copyfileobj(source, file)
    return library


def _fingerprint(library: Path) -> str:
    """Of its first megabyte (all of a small one, headers and symbols of a large one) and its size."""
    with library.open("rb") as file:
        digest = hashlib.sha256(file.read(1 << 20)).hexdigest()
        return f"{digest[:12]}-{os.fstat(file.fileno()).st_size}"
