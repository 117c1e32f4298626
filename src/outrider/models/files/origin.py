"""The record in a converted model folder: its source and the sizes of its files.

Owns `origin.json`. Must not know how the other files are made.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.files.atomic import write_text

FILE_NAME = "origin.json"
FORMAT = 1  # raised when the conversion changes, so that older folders are rebuilt


@dataclass(frozen=True)
class Origin:
    name: str
    source: str  # of the weights: a description or a path
    license: str = "unknown"
    sha256: str | None = None  # of the converted file


def write(folder: Path, origin: Origin) -> None:
    """Write the record. Call this after all other files are written."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    record = {"format": FORMAT, **asdict(origin), "files": sizes}
    (folder / FILE_NAME).write_text(json.dumps(record, indent=2) + "\n")


def forget_size(folder: Path, name: str) -> None:
    """Take a file out of the record, so that it may change. Raises OSError."""
    record = _record(folder)
    if record is not None and record["files"].pop(name, None) is not None:
        write_text(folder / FILE_NAME, json.dumps(record, indent=2) + "\n")


def read(folder: Path) -> Origin | None:
    """Return the origin of a folder that Outrider converted, None for any other folder."""
    record = _record(folder)
    if record is None:
        return None
    return Origin(record["name"], record["source"], record["license"], record["sha256"])


def is_intact(folder: Path) -> bool:
    """True if the folder has the present format and all files have their original sizes."""
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
