"""What a converted model folder says about itself: where it came from and which files belong to it.

Owns `origin.json`. Must not know how the other files are made.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "origin.json"
FORMAT = 1  # raised when the conversion changes, so that older folders are made again


@dataclass(frozen=True)
class Origin:
    name: str
    source: str  # in words or as a path: where the weights came from
    license: str = "unknown"
    sha256: str | None = None  # of the file that was converted, where it was checked


def write(folder: Path, origin: Origin) -> None:
    """Seal `folder`: call it after every other file is written."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    record = {"format": FORMAT, **asdict(origin), "files": sizes}
    (folder / FILE_NAME).write_text(json.dumps(record, indent=2) + "\n")


def read(folder: Path) -> Origin | None:
    """The origin of a folder that Outrider converted; None for any other folder."""
    record = _record(folder)
    if record is None:
        return None
    return Origin(record["name"], record["source"], record["license"], record["sha256"])


def is_intact(folder: Path) -> bool:
    """Whether the folder is of the present format and each of its files has the size it was written with."""
    record = _record(folder)
    if record is None or record["format"] != FORMAT:
        return False
    return all(_has_size(folder / name, size) for name, size in record["files"].items())


def _record(folder: Path) -> dict | None:
    try:
        record = json.loads((folder / FILE_NAME).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "files" in record else None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
