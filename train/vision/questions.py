"""Questions about a scene, with the one answer that each expects.

Owns the wording. The form of an answer follows from the form of its question, so answers can be compared as
strings. Must not know how scenes are made or drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from pictures import COLOURS, SHAPES, Scene, Thing
from scenes import CELL, cell_of

FAR = 24  # pixels between two things of which one is said to be left of, or above, the other
PLACES = (
    ("top left", "top", "top right"),
    ("left", "center", "right"),
    ("bottom left", "bottom", "bottom right"),
)
DIRECTIONS = ("right", "down", "left", "up")
PLURALS = {"cross": "crosses"}

# {the} stands for a thing that is the only one of its kind; {Shape} is {shape} with a capital.
SHAPE_OF_ONE = (
    ("What shape is in the picture?", "A {shape}."),
    ("What shape is this?", "It is a {shape}."),
    ("Which shape do you see?", "I see a {shape}."),
    ("What shape is shown in the image?", "The image shows a {shape}."),
    ("Which shape is it? Answer with one word.", "{Shape}"),
    ("Name the shape in one word.", "{Shape}"),
    ("What is the shape in this picture?", "The shape is a {shape}."),
)
SHAPE_BY_COLOUR = (
    ("What shape is {colour}?", "The {shape} is {colour}."),
    ("Which shape is {colour}?", "The {shape}."),
    ("What is the {colour} shape?", "The {colour} shape is a {shape}."),
    ("What is the {colour} thing? Answer with one word.", "{Shape}"),
)
COLOUR_OF_ONE = (
    ("What {colour_word} is it?", "It is {colour}."),
    ("What {colour_word} is the shape?", "The shape is {colour}."),
    ("Which {colour_word} do you see?", "I see {colour}."),
    ("What is the {colour_word} of the shape? Answer with one word.", "{Colour}"),
)
COLOUR_BY_SHAPE = (
    ("What {colour_word} is the {shape}?", "The {shape} is {colour}."),
    ("Which {colour_word} does the {shape} have?", "The {shape} is {colour}."),
    ("What is the {colour_word} of the {shape}?", "It is {colour}."),
    ("Tell me the {colour_word} of the {shape} in one word.", "{Colour}"),
    ("The {shape} has which {colour_word}?", "{Colour}."),
)
COLOUR_OF_TEXT = (
    ("What {colour_word} is the text?", "The text is {colour}."),
    ("What {colour_word} is the writing?", "It is {colour}."),
    ("In which {colour_word} is it printed? Answer with one word.", "{Colour}"),
)
COLOUR_OF_GROUND = (
    ("What {colour_word} is the background?", "The background is {colour}."),
    ("What is the {colour_word} of the background? Answer with one word.", "{Colour}"),
)
PLACE = (
    ("Where is {the}?", "{The} is at the {place}."),
    ("In which part of the picture is {the}?", "At the {place}."),
    ("Where do you see {the}?", "I see it at the {place}."),
)
SIDE = (
    ("Is {the} left or right of {other}?", "{Side}."),
    ("On which side of {other} is {the}?", "On the {side}."),
)
HEIGHT = (("Is {the} above or below {other}?", "{Side}."),)
COUNT = (
    ("How many {things} are there?", "There {are} {n} {things_n}."),
    ("How many {things} do you see?", "I see {n} {things_n}."),
    ("How many {things} are in the picture? Answer with a number.", "{n}"),
    ("Count the {things}.", "{n}"),
)
NUMBER = (
    ("What number is in the picture?", "{text}"),
    ("What number do you see?", 'I see the number "{text}".'),
    ("Read the number.", "{text}"),
    ("Which number is this?", 'It is "{text}".'),
)
WORD = (
    ("What does it say?", 'It says "{text}".'),
    ("What does the picture say?", 'It says "{text}".'),
    ("Read the text.", "{text}"),
    ("What word is printed in the picture?", 'The word is "{text}".'),
    ("What is written here?", "{text}"),
)
DESCRIBE = ("Describe the picture.", "What is in the picture?", "What do you see?", "Describe this image.")
POINTING = (
    ("Which way does the arrow point?", "It points {direction}."),
    ("In which direction is the arrow pointing?", "{Direction}."),
)
PRESENT = ("Is there {a}?", "Is there {a} in the picture?", "Do you see {a}?", "Can you see {a}?")
BEFORE = ("", "", "", "", "", "Please look. ", "Look at the picture. ", "Hi! ", "I have a question. ")


@dataclass(frozen=True)
class Question:
    kind: str
    text: str
    answer: str


def questions(scene: Scene, random: Random) -> list[Question]:
    """One question of each kind that the scene allows, in no order."""
    asked = list(_about(scene, random))
    random.shuffle(asked)
    return asked


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
    if abs(one.x - other.x) > FAR:
        yield _fill("relation", SIDE, random, side="left" if one.x < other.x else "right", **names)
    elif abs(one.y - other.y) > FAR:
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
    if random.random() < 0.5:  # something that is not there, but nearly
        if random.random() < 0.5:
            shape = random.choice(SHAPES)
        else:
            colour = random.choice(list(COLOURS))
    answer = "Yes." if (shape, colour) in there else "No."
    return Question("presence", random.choice(PRESENT).format(a=_a(f"{colour} {shape}")), answer)


def description(scene: Scene) -> str:
    """Everything, in reading order."""
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
