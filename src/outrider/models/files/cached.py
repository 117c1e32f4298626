"""Lists and removes the models in Outrider's own cache and in the Hugging Face cache.

Never touches a file outside the two caches. Must not know how models are downloaded or run.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.models.errors import ModelUnavailable
from outrider.models.files import origin
from outrider.models.files.folders import models_folder
from outrider.models.files.named import named_model
from outrider.models.files.shipped_head import shipped_head
from outrider.models.heads import HeadError, find_head, locate

Place = Literal["outrider", "huggingface"]


@dataclass(frozen=True)
class CachedModel:
    name: str  # as `serve` and `rm` accept it
    place: Place
    path: Path  # the model folder
    entry: Path  # the folder in the cache that a removal deletes
    num_bytes: int  # freed by a removal
    source: str  # a description
    head: Path | None  # a file, or the model folder if the head is inside its checkpoint
    head_bytes: int = 0
    is_intact: bool = True  # False: incomplete or damaged; rebuilt when needed
    shared_bytes: int = 0  # of files that other models in the cache share


def cached_models() -> list[CachedModel]:
    """Return all models sorted by name, those in Outrider's own cache first."""
    return [*sorted(_own(), key=_by_name), *sorted(_hub(), key=_by_name)]


def find_cached(name: str) -> CachedModel:
    """Return the model of this name. Raises ModelUnavailable if there is none or more than one."""
    models = cached_models()
    own = named_model(name)
    found = [model for model in models if model.name == name]
    found = found or [model for model in models if model.name.lower() == name.lower()]
    found = found or [model for model in models if own is not None and model.name == own.NAME]
    if not found:
        raise ModelUnavailable(f"{name} is not in the cache. `outrider models` lists the cached models.")
    if len(found) > 1:
        raise ModelUnavailable(
            f"{name} is in the cache more than once: {', '.join(model.name for model in found)}."
        )
    return found[0]


def remove(model: CachedModel) -> None:
    """Delete a model and its heads from the cache. Links are deleted, not followed."""
    cache = models_folder() if model.place == "outrider" else _hub_folder()
    if model.entry.parent != cache or model.entry.name.startswith("."):
        raise ModelUnavailable(f"{model.entry} is not in {cache}; nothing was removed.")
    try:
        if model.entry.is_symlink():
            model.entry.unlink()
        elif model.place == "outrider":
            _remove_own(model.entry)
        else:
            shutil.rmtree(model.entry)
    except OSError as error:
        raise ModelUnavailable(f"{model.entry} could not be removed: {error.strerror}.") from error


# -- Outrider's own cache --------------------------------------------------------------------------------


def _own() -> Iterator[CachedModel]:
    folder = models_folder()
    if not folder.is_dir():
        return
    paths = [path for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir()]
    files = {path: _file_sizes(path) for path in paths}
    holders = Counter(file for sizes in files.values() for file in sizes)
    for path, sizes in files.items():
        record = origin.read(path)
        source = record.source if record is not None else "unknown"
        shared = sum(size for file, size in sizes.items() if holders[file] > 1)
        own, head = sum(sizes.values()) - shared, _head(path)
        intact = origin.is_intact(path)
        yield CachedModel(path.name, "outrider", path, path, own, source, *head, intact, shared)


def _remove_own(path: Path) -> None:
    """Rename the folder first, so that no process reads a part of it. The next build removes leftovers."""
    gone = path.with_name(f".{path.name}.part-removed")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def _file_sizes(folder: Path) -> dict[tuple[int, int], int]:
    """Return sizes by device and inode: a file that is linked from two folders has one key."""
    if folder.is_symlink():
        return {}
    files = (path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {(stat.st_dev, stat.st_ino): stat.st_size for stat in files}


# -- the Hugging Face cache ------------------------------------------------------------------------------


def _hub() -> Iterator[CachedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [repo for repo in scan_cache_dir(_hub_folder()).repos if repo.repo_type == "model"]
    except CacheNotFound:
        return
    for repo in repos:
        latest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        path = Path(latest.snapshot_path if latest is not None else repo.repo_path)
        entry, size = Path(repo.repo_path), repo.size_on_disk
        yield CachedModel(repo.repo_id, "huggingface", path, entry, size, "Hugging Face hub", *_head(path))


def _hub_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def _head(folder: Path) -> tuple[Path | None, int]:
    """Where a model's head is, and its bytes."""
    file = find_head(folder) or shipped_head(folder)
    if file is not None:
        return file, file.stat().st_size
    try:
        inside = locate(folder)
    except HeadError:  # a damaged file: `serve` names it
        return None, 0
    return (None, 0) if inside is None else (inside.source, inside.num_bytes)


def _by_name(model: CachedModel) -> str:
    return model.name.lower()
