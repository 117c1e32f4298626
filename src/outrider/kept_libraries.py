"""Shared libraries that are made once, at first use, and kept in the user's cache folder.

A file's name says what the library was made from and how large it is.

Nothing here may import mlx: blas.py has to run first.
"""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

log = logging.getLogger("outrider.blas")

Loaded = TypeVar("Loaded")


class Unusable(Exception):
    """A library that cannot serve; the text says why."""


@dataclass(frozen=True)
class Recipe:
    """How to make a library: what its file is called after, and what writes it."""

    stem: str  # changes with everything that goes into the library
    make: Callable[[Path], None]  # writes the library; OSError where that fails


def load_kept(recipe: Recipe, load: Callable[[str], Loaded]) -> tuple[Loaded, bool]:
    """What `load` makes of the kept library, and whether it is kept now.

    It is made where it is missing, damaged or of other ingredients; for this process only, where there is no
    folder to keep it in.
    """
    folder = cache_folder()
    for library in _intact(folder, recipe.stem):
        with suppress(OSError, Unusable):
            return load(str(library)), True
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return load(str(_write(recipe, folder))), True
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("BLAS: %s cannot be kept in %s: %s", recipe.stem, folder, error)
    with tempfile.TemporaryDirectory(prefix="outrider-blas-") as temporary:  # the mapping outlives the file
        return load(str(_write(recipe, Path(temporary)))), False


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "outrider" / "blas"


def _intact(folder: Path, stem: str) -> Iterator[Path]:
    """Libraries of the size their name gives (opening a cut one could crash), written by us or by root."""
    for library in folder.glob(f"{stem}-*.so"):
        with suppress(OSError):
            status = library.stat()
            if library.stem == f"{stem}-{status.st_size}" and status.st_uid in (0, os.getuid()):
                yield library


def _write(recipe: Recipe, folder: Path) -> Path:
    """Make the library in `folder`, whole or not at all, whoever else does so meanwhile."""
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder) as workshop:
        draft = Path(workshop, "draft.so")
        recipe.make(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        library = folder / f"{recipe.stem}-{draft.stat().st_size}.so"
        os.replace(draft, library)
    return library
