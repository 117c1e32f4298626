"""The GGUF file that the default model is made from, kept in Outrider's cache folder for llama.cpp."""

from __future__ import annotations

from pathlib import Path

from outrider.files.cache_folder import cache_folder
from outrider.models.files.default_download import SMOLLM2, Release, download
from outrider.models.files.folders import build_once
from outrider.progress import ProgressBar


def default_gguf(release: Release = SMOLLM2) -> Path:
    """Downloads the file on first use, with its checksum verified. Raises ModelUnavailable."""

    def build(work: Path) -> None:
        scratch = work.parent / "download"
        scratch.mkdir()
        bar = ProgressBar()
        try:
            download(release, scratch, bar).path.rename(work / release.file_name)
        finally:
            bar.close()

    def is_usable(folder: Path) -> bool:
        file = folder / release.file_name
        return file.is_file() and file.stat().st_size == release.num_bytes

    return build_once(cache_folder() / "gguf", build, is_usable) / release.file_name
