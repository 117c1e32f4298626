"""What models this machine holds: Outrider's own cache and the Hugging Face cache, listed and removed.

Nothing outside the two is ever named or touched. Must not know how models are fetched or run.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.models.errors import ModelUnavailable
from outrider.models.files import origin
from outrider.models.files.folders import models_folder
from outrider.models.files.named import named_model
from outrider.models.files.shipped_head import shipped_head
from outrider.models.heads import find_head

Place = Literal["outrider", "huggingface"]


@dataclass(frozen=True)
class CachedModel:
    name: str  # what `serve` and `rm` take
    place: Place
    path: Path  # the model folder
    entry: Path  # the folder of the cache that holds it: what a removal removes
    num_bytes: int  # of its own: what a removal gives back
    source: str  # where it came from, in words
    head: Path | None
    is_intact: bool = True  # False: unfinished or damaged; it will be made again when it is needed
    shared_bytes: int = 0  # of files that other models of the cache hold, too

    @property
    def head_bytes(self) -> int:
        return self.head.stat().st_size if self.head is not None else 0


def cached_models() -> list[CachedModel]:
    """By name, Outrider's own first."""
    return [*sorted(_own(), key=_by_name), *sorted(_hub(), key=_by_name)]


def find_cached(name: str) -> CachedModel:
    """The one model of this name; ModelUnavailable if there is none, or more than one."""
    models = cached_models()
    own = named_model(name)
    found = [model for model in models if model.name == name]
    found = found or [model for model in models if model.name.lower() == name.lower()]
    found = found or [model for model in models if own is not None and model.name == own.NAME]
    if not found:
        raise ModelUnavailable(f"{name} is not in the cache. `outrider models` lists what is.")
    if len(found) > 1:
        raise ModelUnavailable(
            f"{name} is in the cache more than once: {', '.join(one.name for one in found)}."
        )
    return found[0]


def remove(model: CachedModel) -> None:
    """Take a model out of its cache, heads and all. Nothing else is touched, and no link is followed."""
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
        own, head = sum(sizes.values()) - shared, find_head(path) or shipped_head(path)
        intact = origin.is_intact(path)
        yield CachedModel(path.name, "outrider", path, path, own, source, head, intact, shared)


def _remove_own(path: Path) -> None:
    """Gone in one step, so that no process sees half of it; a builder clears what a crash leaves behind."""
    gone = path.with_name(f".{path.name}.part-removed")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def _file_sizes(folder: Path) -> dict[tuple[int, int], int]:
    """By file, whatever its names are: one that is linked from two folders is the same in both."""
    if folder.is_symlink():
        return {}
    files = (path.stat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {(stat.st_dev, stat.st_ino): stat.st_size for stat in files}


# -- the Hugging Face cache ------------------------------------------------------------------------------


def _hub() -> Iterator[CachedModel]:
    for repo in _hub_repos():
        latest = max(repo.revisions, key=lambda revision: revision.last_modified, default=None)
        path = Path(latest.snapshot_path if latest is not None else repo.repo_path)
        entry, size = Path(repo.repo_path), repo.size_on_disk
        yield CachedModel(repo.repo_id, "huggingface", path, entry, size, "Hugging Face hub", find_head(path))


def _hub_repos() -> list[Any]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir(_hub_folder()).repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _hub_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def _by_name(model: CachedModel) -> str:
    return model.name.lower()
