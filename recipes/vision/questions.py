"""Questions about a scene, each with its one correct answer.

The wording of a question determines the wording of its answer (wording.py), so answers can be compared as
strings. Must not know how scenes are made or drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from pictures import COLOURS, SHAPES, Scene, Thing
from scenes import CELL, cell_of
from wording import (
    BEFORE,
    COLOUR_BY_SHAPE,
    COLOUR_OF_GROUND,
    COLOUR_OF_ONE,
    COLOUR_OF_TEXT,
    COUNT,
    DESCRIBE,
    HEIGHT,
    NUMBER,
    PLACE,
    POINTING,
    PRESENT,
    SHAPE_BY_COLOUR,
    SHAPE_OF_ONE,
    SIDE,
    WORD,
)

MIN_DISTANCE = 24  # pixels between two things before a question asks which is left, or above
PLACES = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)
DIRECTIONS = ("right", "down", "left", "up")
PLURALS = {"cross": "crosses"}

KINDS = (
    "describe",
    "ground",
    "number",
    "word",
    "text colour",
    "shape",
    "colour",
    "count",
    "presence",
    "place",
    "relation",
    "direction",
)
NUM_SELECTING_FIRST = 6  # questions that select one shape of several; further ones come last


@dataclass(frozen=True)
class Question:
    kind: str
    text: str
    answer: str


def questions(scene: Scene, random: Random) -> list[Question]:
    """One question of each kind that the scene allows, in random order."""
    asked = list(_about(scene, random))
    random.shuffle(asked)
    return asked


def every_question(scene: Scene, random: Random) -> list[Question]:
    """One question of each kind, and questions that select one of several shapes. The best come first."""
    asked = questions(scene, random)
    shapes = [thing for thing in scene.things if not thing.text]
    if len(shapes) < 2:
        return asked
    selecting = [*_selecting(shapes, random)]
    random.shuffle(selecting)
    others = [question for question in asked if question.kind not in ("shape", "colour")]
    return [*selecting[:NUM_SELECTING_FIRST], *others, *selecting[NUM_SELECTING_FIRST:]]


def _selecting(shapes: list[Thing], random: Random) -> Iterator[Question]:
    """For each unique colour: what shape has it? For each unique shape: what colour has it?"""
    by_shape = Counter(thing.shape for thing in shapes)
    by_colour = Counter(thing.colour for thing in shapes)
    for thing in shapes:
        if by_colour[thing.colour] == 1:
            yield _about_thing("shape", SHAPE_BY_COLOUR, random, thing)
        if by_shape[thing.shape] == 1:
            yield _about_thing("colour", COLOUR_BY_SHAPE, random, thing)


def with_opening(question: Question, random: Random) -> Question:
    return Question(question.kind, random.choice(BEFORE) + question.text, question.answer)


def _about(scene: Scene, random: Random) -> Iterator[Question]:
    shapes = [thing for thing in scene.things if not thing.text]
    texts = [thing for thing in scene.things if thing.text]
    yield Question("describe", random.choice(DESCRIBE), description(scene))
    if scene.ground:
        yield _fill("ground", COLOUR_OF_GROUND, random, colour=scene.ground)
    for thing in texts:
        kind, forms = ("number", NUMBER) if thing.text.isdigit() else ("word", WORD)
        yield _fill(kind, forms, random, text=thing.text)
        yield _fill("text colour", COLOUR_OF_TEXT, random, colour=thing.colour)
    if shapes:
        yield from _about_shapes(shapes, random)


def _about_shapes(shapes: list[Thing], random: Random) -> Iterator[Question]:
    by_shape = Counter(thing.shape for thing in shapes)
    by_colour = Counter(thing.colour for thing in shapes)
    only_shape = [thing for thing in shapes if by_shape[thing.shape] == 1]
    only_colour = [thing for thing in shapes if by_colour[thing.colour] == 1]
    if len(shapes) == 1:
        forms = random.choice((SHAPE_OF_ONE, SHAPE_OF_ONE, SHAPE_BY_COLOUR))
        yield _about_thing("shape", forms, random, shapes[0])
        forms = random.choice((COLOUR_OF_ONE, COLOUR_BY_SHAPE))
        yield _about_thing("colour", forms, random, shapes[0])
    else:
        if only_colour:
            yield _about_thing("shape", SHAPE_BY_COLOUR, random, random.choice(only_colour))
        if only_shape:
            yield _about_thing("colour", COLOUR_BY_SHAPE, random, random.choice(only_shape))
    yield _count(shapes, random)
    yield _presence(shapes, random)
    placed = [thing for thing in only_shape if thing.radius <= CELL / 2 and _is_well_inside_a_cell(thing)]
    if placed:
        yield _place(random.choice(placed), random)
    if len(only_shape) > 1:
        yield from _relation(*random.sample(only_shape, 2), random)
    if by_shape["arrow"] == 1:
        arrow = next(thing for thing in shapes if thing.shape == "arrow")
        direction = DIRECTIONS[round(arrow.turn / 90) % 4]
        yield _fill("direction", POINTING, random, direction=direction)


def _is_well_inside_a_cell(thing: Thing) -> bool:
    return all(
        abs(at - CELL * round(at / CELL)) > 9 or at < 9 or at > 2.8 * CELL for at in (thing.x, thing.y)
    )


def _place(thing: Thing, random: Random) -> Question:
    row, column = cell_of(thing)
    place = PLACES[row][column]
    question = _fill("place", PLACE, random, the=f"the {thing.shape}", place=place)
    answer = question.answer.replace("at the left", "on the left").replace("at the right", "on the right")
    answer = answer.replace("At the left", "On the left").replace("At the right", "On the right")
    answer = answer.replace("at the center", "in the center").replace("At the center", "In the center")
    return Question("place", question.text, answer)


def _relation(one: Thing, other: Thing, random: Random) -> Iterator[Question]:
    names = {"the": f"the {one.shape}", "other": f"the {other.shape}"}
    if abs(one.x - other.x) > MIN_DISTANCE:
        yield _fill("relation", SIDE, random, side="left" if one.x < other.x else "right", **names)
    elif abs(one.y - other.y) > MIN_DISTANCE:
        yield _fill("relation", HEIGHT, random, side="above" if one.y < other.y else "below", **names)


def _count(shapes: list[Thing], random: Random) -> Question:
    thing = random.choice(shapes)
    ways = [("shapes", "shape", len(shapes))]
    ways.append((_plural(thing.shape), thing.shape, sum(t.shape == thing.shape for t in shapes)))
    ways.append(
        (f"{thing.colour} shapes", f"{thing.colour} shape", sum(t.colour == thing.colour for t in shapes))
    )
    if random.random() < 0.15:
        shape = random.choice(SHAPES)
        ways = [(_plural(shape), shape, sum(t.shape == shape for t in shapes))]
    many, single, n = random.choice(ways)
    are, things_n = ("is", single) if n == 1 else ("are", many)
    return _fill("count", COUNT, random, things=many, n=str(n), are=are, things_n=things_n)


def _presence(shapes: list[Thing], random: Random) -> Question:
    there = {(thing.shape, thing.colour) for thing in shapes}
    shape, colour = random.choice(sorted(there))
    if random.random() < 0.5:  # often a shape that is not there, but similar to one that is
        if random.random() < 0.5:
            shape = random.choice(SHAPES)
        else:
            colour = random.choice(list(COLOURS))
    answer = "Yes." if (shape, colour) in there else "No."
    return Question("presence", random.choice(PRESENT).format(a=_a(f"{colour} {shape}")), answer)


def description(scene: Scene) -> str:
    """All things, in reading order."""
    things = sorted(scene.things, key=cell_of)
    counted = Counter(
        f'the text "{thing.text}" in {thing.colour}' if thing.text else f"{thing.colour} {thing.shape}"
        for thing in things
    )
    parts = []
    for name, count in counted.items():
        if name.startswith("the text"):
            parts.append(name)
        elif count == 1:
            parts.append(_a(name))
        else:
            colour, shape = name.split()
            parts.append(f"{count} {colour} {_plural(shape)}")
    listed = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return listed[0].upper() + listed[1:] + "."


def _about_thing(kind: str, forms: tuple[tuple[str, str], ...], random: Random, thing: Thing) -> Question:
    return _fill(kind, forms, random, shape=thing.shape, colour=thing.colour)


def _fill(kind: str, forms: tuple[tuple[str, str], ...], random: Random, **values: str) -> Question:
    question, answer = random.choice(forms)
    values["colour_word"] = random.choice(("color", "colour"))
    values |= {name.capitalize(): value[:1].upper() + value[1:] for name, value in values.items()}
    answer = answer.replace(" a {shape}", " {a_shape}").replace("A {shape}", "{A_shape}")
    if "shape" in values:
        values["a_shape"] = _a(values["shape"])
        values["A_shape"] = values["a_shape"].capitalize()
    return Question(kind, question.format(**values), answer.format(**values))


def _a(name: str) -> str:
    return ("an " if name[0] in "aeiou" else "a ") + name


def _plural(shape: str) -> str:
    return PLURALS.get(shape, shape + "s")
