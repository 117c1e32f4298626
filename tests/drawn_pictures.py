"""The held-out pictures that outrider-see-135m is asked about, drawn by the code that drew its training's."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.models.see_model import EYE
from picture_files import data_url, encoded

DRAWING = Path(__file__).parent.parent / "train" / "vision"
NUM_SINGLE = 20  # the first scenes have one shape each


@dataclass(frozen=True)
class Question:
    shape: str  # what is in the picture
    kind: str  # "shape" or "colour"
    url: str  # of the picture
    text: str
    answer: str

    @property
    def content(self) -> list[Any]:
        return [{"type": "image_url", "image_url": {"url": self.url}}, {"type": "text", "text": self.text}]


def questions_about_single_shapes() -> list[Question]:
    stored = json.loads((EYE / "held_out_pictures.json").read_text())[:NUM_SINGLE]
    return [question for picture in stored for question in _questions(picture)]


def _questions(picture: dict[str, Any]) -> Iterator[Question]:
    (thing,) = picture["scene"]["things"]
    drawing = _drawing()
    url = data_url(encoded(drawing.draw(drawing.Scene.from_json(picture["scene"]))))
    for asked in picture["questions"]:
        yield Question(thing["shape"], asked["kind"], url, asked["text"], asked["answer"])


def _drawing() -> Any:
    """train/vision/pictures.py, which finds its neighbours by the search path."""
    sys.path.insert(0, str(DRAWING))
    try:
        return importlib.import_module("pictures")
    finally:
        sys.path.remove(str(DRAWING))
