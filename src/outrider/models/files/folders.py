"""The folder of models in the cache, and how a model folder gets there whole or not at all.

Must not know what a model folder contains.
"""

import errno
from collections.abc import Callable
from pathlib import Path

from outrider.files.atomic import build_folder
from outrider.files.cache_folder import cache_folder
from outrider.models.errors import ModelUnavailable

READ_ONLY_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def models_folder() -> Path:
    return cache_folder() / "models"


def build_once(
    target: Path, build: Callable[[Path], None], is_usable: Callable[[Path], bool] = Path.is_dir
) -> Path:
    """Return `target`, made by `build(work folder)` if there is no usable one yet.

    If several processes need the folder at once, one builds it and the others wait.
    """
    if is_usable(target):  # before any lock: a cache on a read-only disk can be used
        return target
    try:
        build_folder(target, build, is_usable)
    except OSError as error:
        raise ModelUnavailable(_storage_message(error, target.parent)) from error
    return target


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
