"""Models that go by a name of their own, in any case, and are made ready on first use. Owns the list."""

from pathlib import Path
from typing import Protocol

from outrider.models.files import default_model, vision_model
from outrider.progress import Listener, ProgressBar


class NamedModel(Protocol):
    NAME: str

    def ensure(self, progress: Listener) -> Path: ...


NAMED: tuple[NamedModel, ...] = (default_model, vision_model)


def named_model(name: str | Path) -> NamedModel | None:
    return next((one for one in NAMED if one.NAME.lower() == str(name).lower()), None)


def make_ready(model: NamedModel) -> Path:
    """The model's folder; the terminal shows what is fetched and converted."""
    bar = ProgressBar()
    try:
        return model.ensure(bar)
    finally:
        bar.close()
