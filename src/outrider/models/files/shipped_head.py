"""Heads that come with Outrider, for models that have none of their own."""

from __future__ import annotations

from pathlib import Path

from outrider.models.files import origin
from outrider.models.files.default_download import SMOLLM2

DATA = Path(__file__).parent / "data"
HEADS = {SMOLLM2.sha256: DATA / "smollm2-135m-instruct" / "head.safetensors"}  # by the model file's sha256


def shipped_head(model_folder: Path) -> Path | None:
    """The head that was trained for the model in this folder, if Outrider brings one."""
    made_from = origin.read(model_folder)
    file = HEADS.get(made_from.sha256 or "") if made_from is not None else None
    return file if file is not None and file.is_file() else None
