"""The held-out images for outrider-vision-135m, drawn by the code that drew its training images."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_files import data_url, encoded
from outrider.models.files.vision_model import ENCODER_FOLDER

DRAWING = Path(__file__).parent.parent / "recipes" / "vision"
SHAPE_AND_COLOUR = ("shape", "colour")


@dataclass(frozen=True)
class Question:
    shape: str  # the shape of the only thing, or of the first thing, in the image
    num_shapes: int
    kind: str  # "shape" or "colour"
    url: str  # of the image
    text: str
    answer: str

    @property
    def content(self) -> list[Any]:
        return [{"type": "image_url", "image_url": {"url": self.url}}, {"type": "text", "text": self.text}]


def questions_about_shapes() -> list[Question]:
    """All questions about a shape or a colour, of one shape or of one among several."""
    stored = json.loads((ENCODER_FOLDER / "held_out_images.json").read_text())
    return [question for picture in stored for question in _questions(picture)]


def questions_about_single_shapes() -> list[Question]:
    return [question for question in questions_about_shapes() if question.num_shapes == 1]


def _questions(picture: dict[str, Any]) -> Iterator[Question]:
    asked = [one for one in picture["questions"] if one["kind"] in SHAPE_AND_COLOUR]
    if not asked:
        return
    things = picture["scene"]["things"]
    drawing = _drawing()
    url = data_url(encoded(drawing.draw(drawing.Scene.from_json(picture["scene"]))))
    for one in asked:
        yield Question(things[0]["shape"], len(things), one["kind"], url, one["text"], one["answer"])


def _drawing() -> Any:
    """recipes/vision/pictures.py, which finds its neighbours by the search path."""
    sys.path.insert(0, str(DRAWING))
    try:
        return importlib.import_module("pictures")
    finally:
        sys.path.remove(str(DRAWING))
