"""Random scenes, and the contents that are held out of training.

Held out: ten pairs of a shape and a colour, the words of words.HELD_OUT, and the numbers for which
`is_held_out_number` is True. Must not know about questions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import font
import words
from pictures import BACKGROUNDS, COLOURS, SHAPES, SIZE, Colour, Scene, Thing, half_size

HELD_OUT_PAIRS = frozenset(
    {
        ("circle", "purple"),
        ("square", "orange"),
        ("triangle", "pink"),
        ("star", "blue"),
        ("ring", "yellow"),
        ("cross", "red"),
        ("diamond", "brown"),
        ("heart", "green"),
        ("arrow", "black"),
        ("crescent", "gray"),
    }
)
# Largest rotation of a shape in either direction, in degrees. Other shapes: any rotation.
TURNS = {"square": 14, "triangle": 20, "cross": 14, "diamond": 14, "heart": 20, "arrow": 10}
CELL = SIZE / 3  # pixels; several things are placed on a grid of three by three cells
MIN_CONTRAST = 120  # between a thing and the background: sum of the differences of red, green and blue


def is_held_out_number(digits: str) -> bool:
    return len(digits) > 1 and int(digits) % 11 == 3


class SceneMaker:
    """Scenes from one stream of random numbers: scenes for training, or scenes with held-out contents."""

    def __init__(self, seed: int | str, *, held_out: bool = False) -> None:
        self.random = random.Random(seed)
        self._held_out = held_out

    def one_shape(self) -> Scene:
        """One shape of any size, at any place."""
        radius = self.random.uniform(12, 56) if self.random.random() < 0.7 else self.random.uniform(10, 20)
        x, y = (self.random.uniform(min(radius, 60), SIZE - min(radius, 60)) for _ in range(2))
        return self._with_ground(lambda ground: [self._shape(*self._pair(ground), x, y, radius)])

    def shapes(self) -> Scene:
        """One to five shapes in different cells. Each has its own random shape and colour."""
        count = self.random.choice((1, 2, 2, 3, 3, 4, 5))
        return self._with_ground(lambda ground: self._in_cells([self._pair(ground) for _ in range(count)]))

    def crowd(self) -> Scene:
        """One to six shapes of one or two kinds."""
        count = self.random.randint(1, 6)

        def things(ground: Sequence[Colour]) -> list[Thing]:
            kinds = [self._pair(ground) for _ in range(self.random.choice((1, 1, 2)))]
            return self._in_cells([self.random.choice(kinds) for _ in range(count)])

        return self._with_ground(things)

    def number(self) -> Scene:
        """A number of one to four digits."""
        while True:
            digits = str(self.random.randrange(10 ** self.random.randint(1, 4)))
            if is_held_out_number(digits) == self._held_out:
                break
        return self._with_ground(lambda ground: [self._text(digits, ground)])

    def word(self) -> Scene:
        """A word. In training, half of the texts are random letters."""
        if self._held_out:
            word = self.random.choice(sorted(words.HELD_OUT))
        elif self.random.random() < 0.5:
            word = self.random.choice(words.TRAINED)
        else:
            word = self._letters()
        return self._with_ground(lambda ground: [self._text(word, ground)])

    def labelled(self) -> Scene:
        """A shape with a digit or a short word above or below it."""
        text = str(self.random.randrange(10)) if self.random.random() < 0.6 else self._letters(3)
        up = self.random.random() < 0.5

        def things(ground: Sequence[Colour]) -> list[Thing]:
            high, low = self.random.uniform(28, 36), self.random.uniform(88, 98)
            x = self.random.uniform(40, 88)
            shape = self._shape(*self._pair(ground), x, low if up else high, self.random.uniform(16, 28))
            return [shape, self._text(text, ground, high if up else low, most=14)]

        return self._with_ground(things)

    def _letters(self, most: int = 5) -> str:
        while True:
            word = "".join(self.random.choices(font.CHARACTERS[:26], k=self.random.randint(2, most)))
            if word not in words.HELD_OUT:
                return word

    def _pair(self, ground: Sequence[Colour]) -> tuple[str, str, Colour]:
        """A shape, the name of its colour, and the colour, which has enough contrast to the background."""
        while True:
            shape, colour = self.random.choice(SHAPES), self.random.choice(list(COLOURS))
            if self._held_out:
                shape, colour = self.random.choice(sorted(HELD_OUT_PAIRS))
            elif (shape, colour) in HELD_OUT_PAIRS:
                continue
            rgb = self._shade(COLOURS[colour])
            if stands_out(rgb, ground):
                return shape, colour, rgb

    def _shape(self, shape: str, colour: str, rgb: Colour, x: float, y: float, radius: float) -> Thing:
        limit = TURNS.get(shape, 180)
        turn = self.random.uniform(-limit, limit)
        if shape == "arrow":
            turn += 90 * self.random.randrange(4)
        return Thing(shape, "", colour, rgb, round(x, 2), round(y, 2), round(radius, 2), round(turn, 1))

    def _in_cells(self, kinds: Sequence[tuple[str, str, Colour]]) -> list[Thing]:
        things = []
        for (shape, colour, rgb), cell in zip(kinds, self.random.sample(range(9), len(kinds)), strict=True):
            radius = self.random.uniform(11, 19)
            room = CELL / 2 - radius + 3
            x, y = (
                CELL * (place + 0.5) + self.random.uniform(-room, room) for place in (cell % 3, cell // 3)
            )
            things.append(self._shape(shape, colour, rgb, x, y, radius))
        return things

    def _text(self, text: str, ground: Sequence[Colour], y: float | None = None, most: float = 36) -> Thing:
        widest = (SIZE / 2 - 4) * font.HEIGHT / font.width_of(text)
        radius = self.random.uniform(min(8, widest), min(most, widest))
        turn = self.random.uniform(-8, 8) if self.random.random() < 0.5 else 0.0
        while True:
            colour = self.random.choice(list(COLOURS))
            rgb = self._shade(COLOURS[colour])
            if stands_out(rgb, ground):
                break
        thing = Thing("", text, colour, rgb, SIZE / 2, SIZE / 2, round(radius, 2), round(turn, 1))
        wide, high = half_size(thing)
        x = self._within(wide + 2)
        y = self._within(high + 2) if y is None else y
        return Thing("", text, colour, rgb, round(x, 2), round(y, 2), thing.radius, thing.turn)

    def _within(self, margin: float) -> float:
        if margin >= SIZE / 2:
            return SIZE / 2
        return self.random.uniform(margin, SIZE - margin)

    def _shade(self, shades: Sequence[Colour]) -> Colour:
        red, green, blue = self.random.choice(shades)
        if self.random.random() < 0.4:
            return red, green, blue
        r, g, b = (min(255, max(0, c + self.random.randint(-14, 14))) for c in (red, green, blue))
        return r, g, b

    def _with_ground(self, things: Callable[[Sequence[Colour]], list[Thing]]) -> Scene:
        name = self.random.choice(
            ("white", "white", "black", "gray", "pale", "pale", "dark", "any", "shaded")
        )
        if name == "any":
            name = self.random.choice(list(COLOURS))
        if name == "shaded":
            kind = self.random.choice(("pale", "dark"))
            start, end = (self._shade(BACKGROUNDS[kind]) for _ in range(2))
        else:
            start = end = self._shade(BACKGROUNDS[name])
        return Scene(
            ground=name if name in COLOURS else "",
            from_rgb=start,
            to_rgb=end,
            direction=self.random.randrange(360),
            noise=round(self.random.uniform(2, 18), 1) if self.random.random() < 0.4 else 0,
            noise_at=self.random.randrange(SIZE * SIZE * 3),
            things=tuple(things((start, end))),
        )


def stands_out(rgb: Colour, ground: Sequence[Colour]) -> bool:
    return all(sum(abs(a - b) for a, b in zip(rgb, other, strict=True)) >= MIN_CONTRAST for other in ground)


def cell_of(thing: Thing) -> tuple[int, int]:
    """Row and column of the cell with the thing's centre."""
    return min(2, int(thing.y / CELL)), min(2, int(thing.x / CELL))


KINDS: dict[str, tuple[Callable[[SceneMaker], Scene], int]] = {  # and the relative frequency of each
    "one_shape": (SceneMaker.one_shape, 20),
    "shapes": (SceneMaker.shapes, 30),
    "crowd": (SceneMaker.crowd, 14),
    "number": (SceneMaker.number, 12),
    "word": (SceneMaker.word, 18),
    "labelled": (SceneMaker.labelled, 6),
}


def any_scene(maker: SceneMaker) -> Scene:
    makers, frequencies = zip(*KINDS.values(), strict=True)
    make: Callable[[SceneMaker], Scene] = maker.random.choices(makers, frequencies)[0]
    return make(maker)


def scene_of_several(maker: SceneMaker) -> Scene:
    """Two shapes or more."""
    while True:
        scene = maker.shapes() if maker.random.random() < 0.8 else maker.crowd()
        if len(scene.things) > 1:
            return scene


def scene_of_few(maker: SceneMaker) -> Scene:
    """One shape, or a text, or a shape and a text."""
    while True:
        scene = any_scene(maker)
        if len(scene.things) == 1 or any(thing.text for thing in scene.things):
            return scene
