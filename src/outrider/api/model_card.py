"""What the server tells about a model's files and abilities, beside the engine's ModelFacts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelCard:
    num_bytes: int = 0  # of all files
    digest: str = ""  # of the files' names and sizes, and of config.json
    modified_s: float = 0.0  # the latest change of a file
    template: str = ""  # Jinja source of the chat template
    thinks: bool | None = None  # whether its answers have reasoning; None: not known


NO_CARD = ModelCard()


def model_card(folder: Path, template: str = "", thinks: bool | None = None) -> ModelCard:
    """Reads the names and sizes of the files, not their content."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    found = {file.relative_to(folder).as_posix(): file.stat() for file in files}
    digest = hashlib.sha256()
    for name, facts in found.items():
        digest.update(f"{name}\0{facts.st_size}\0".encode())
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    return ModelCard(
        num_bytes=sum(facts.st_size for facts in found.values()),
        digest=digest.hexdigest(),
        modified_s=max((facts.st_mtime for facts in found.values()), default=0.0),
        template=template,
        thinks=thinks,
    )
