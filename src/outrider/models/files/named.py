"""The models that Outrider knows by name, in any case, and makes ready on first use."""

from pathlib import Path
from typing import Protocol

from outrider.models.files import default_model, embedding_model, vision_model
from outrider.progress import Listener, ProgressBar


class NamedModel(Protocol):
    NAME: str
    OLD_NAMES: tuple[str, ...]  # names of earlier releases, which go on working

    def folder(self) -> Path: ...  # where it is, or will be

    def ensure(self, progress: Listener) -> Path: ...


NAMED: tuple[NamedModel, ...] = (default_model, vision_model, embedding_model)


def named_model(name: str | Path) -> NamedModel | None:
    wanted = str(name).lower()
    return next((model for model in NAMED if wanted in map(str.lower, (model.NAME, *model.OLD_NAMES))), None)


def make_ready(model: NamedModel) -> Path:
    """Return the model's folder. A bar on the terminal shows downloads and conversions."""
    bar = ProgressBar()
    try:
        return model.ensure(bar)
    finally:
        bar.close()
