"""Small files that are there whole or not at all, and a folder that one process has for itself. No MLX."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.train.errors import TrainingError

LOCK_NAME = "lock"


def write_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        os.replace(part, path)
    except OSError as error:
        raise TrainingError(f"{path} cannot be written: {error.strerror}.") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """TrainingError if another process holds this folder. The kernel frees it when its holder ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK_NAME, "a")  # noqa: SIM115
    except OSError as error:
        raise TrainingError(f"{folder} cannot be written: {error.strerror}.") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"Another process is training in {folder}.") from None
        yield
