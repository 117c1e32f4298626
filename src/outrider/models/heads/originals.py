"""Original checkpoints, from which a head is copied: a folder, or a repository that is fetched in part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from outrider.models.heads.errors import HeadError
from outrider.models.heads.head_files import read_config, read_header

CONFIG, INDEX, WHOLE = "config.json", "model.safetensors.index.json", "model.safetensors"


class Original(Protocol):
    name: str
    commit: str | None  # of a Hugging Face repository, once a file of it was fetched

    def config(self) -> dict[str, Any]: ...

    def shards(self) -> dict[str, str]:
        """The file of every tensor, by the tensor's name. Fetches no weights if there is an index."""
        ...

    def fetch(self, shard: str) -> Path:
        """The local path of the file."""
        ...


class LocalOriginal:
    """A checkpoint's folder."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.commit: str | None = None
        self._folder = folder

    def config(self) -> dict[str, Any]:
        return read_config(self._folder)

    def shards(self) -> dict[str, str]:
        files = sorted(self._folder.glob("*.safetensors"))
        return {name: file.name for file in files for name in read_header(file)[0]}

    def fetch(self, shard: str) -> Path:
        return self._folder / shard


class HubOriginal:
    """A Hugging Face repository. Files go to the hub's cache, where interrupted downloads are resumed.

    The first file fixes the commit of all others.
    """

    def __init__(self, repo_id: str, revision: str | None = None) -> None:
        """`revision`: commit, tag or branch; None: its main branch."""
        self.name = repo_id
        self.commit: str | None = None
        self._revision = revision

    def config(self) -> dict[str, Any]:
        return _json(self._download(CONFIG))

    def shards(self) -> dict[str, str]:
        from huggingface_hub.errors import EntryNotFoundError

        try:
            index = self._download(INDEX)
        except EntryNotFoundError:  # a checkpoint of one file: fetch all of it
            file = self.fetch(WHOLE)
            return dict.fromkeys(read_header(file)[0], WHOLE)
        return {str(name): str(shard) for name, shard in _json(index).get("weight_map", {}).items()}

    def fetch(self, shard: str) -> Path:
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return self._download(shard)
        except EntryNotFoundError as error:
            raise HeadError(f"{self.name} has no {shard}: not a checkpoint in safetensors.") from error

    def _download(self, file: str) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            path = Path(hf_hub_download(self.name, file, revision=self.commit or self._revision))
        except EntryNotFoundError:
            raise
        except Exception as error:  # errors of the hub, the network or the disk
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise HeadError(f"{self.name}: {file} could not be fetched ({reason}).") from error
        if path.parent.parent.name == "snapshots":  # the hub's cache: snapshots/COMMIT/FILE
            self.commit = path.parent.name
        return path


def original(source: str, revision: str | None = None) -> Original:
    """A folder, or a Hugging Face id of the form owner/name (at a commit, tag or branch of it)."""
    folder = Path(source).expanduser()
    if revision is not None and folder.exists():
        raise HeadError(f"--revision {revision} needs a Hugging Face id (owner/name), not {source}.")
    if folder.is_dir():
        return LocalOriginal(folder)
    if folder.exists():
        raise HeadError(f"{source} is a file; an original is a checkpoint folder or a Hugging Face id.")
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise HeadError(f"{source}: no such folder, and not a Hugging Face id of the form owner/name.")
    return HubOriginal(source, revision)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise HeadError(f"{file} cannot be read: {error}") from error
    return found if isinstance(found, Mapping) else {}  # type: ignore[return-value]
