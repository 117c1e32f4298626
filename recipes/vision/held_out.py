"""Writes the held-out pictures that tests ask about: sixty scenes with their questions and answers.

    python recipes/vision/held_out.py held_out_images.json

A scene is stored whole, so `pictures.draw(Scene.from_json(...))` gives the same picture everywhere. None of
its seeds is used in training or evaluation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pictures import Scene
from questions import questions
from scenes import SceneMaker

PLAN = (  # scene, whether of what training never shows, how many, which questions
    (SceneMaker.one_shape, True, 20, ("shape", "colour")),
    (SceneMaker.shapes, True, 10, ("shape", "colour", "place")),
    (SceneMaker.shapes, False, 8, ("shape", "colour", "relation")),
    (SceneMaker.crowd, False, 8, ("count",)),
    (SceneMaker.number, True, 7, ("number",)),
    (SceneMaker.word, True, 7, ("word",)),
)


def held_out_images() -> list[dict[str, Any]]:
    found = []
    for kind, (make, held_out, count, wanted) in enumerate(PLAN):
        maker = SceneMaker(f"held-out pictures {kind}", held_out=held_out)
        pictures: list[dict[str, Any]] = []
        while len(pictures) < count:
            scene = make(maker)
            asked = [q for q in questions(scene, maker.random) if q.kind in wanted]
            if {q.kind for q in asked} >= set(wanted):
                pictures.append(_as_json(scene, [vars(question) for question in asked]))
        found += pictures
    return found


def _as_json(scene: Scene, asked: list[dict[str, str]]) -> dict[str, Any]:
    return {"scene": scene.as_json(), "questions": sorted(asked, key=lambda question: question["kind"])}


def main() -> None:
    lines = ",\n".join(json.dumps(picture) for picture in held_out_images())
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
