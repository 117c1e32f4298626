"""Scenes and their images: coloured shapes and printed text on a plain, shaded or noisy background.

A scene determines every pixel of its image: the same scene gives the same bytes on every machine with NumPy.
Must not know about questions, tokens or training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import font
import numpy as np

SIZE = 128  # width and height in pixels
GRID = 16  # patches in a row and in a column, for `patch_labels`
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "diamond", "heart", "arrow", "crescent")
COLOURS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "red": ((255, 0, 0), (225, 25, 35), (200, 20, 20)),
    "orange": ((255, 140, 0), (255, 128, 10), (245, 130, 30)),
    "yellow": ((255, 235, 0), (255, 220, 30), (250, 230, 60)),
    "green": ((0, 160, 0), (0, 200, 40), (30, 130, 50), (0, 255, 0)),
    "blue": ((0, 0, 255), (30, 80, 220), (20, 50, 180), (40, 120, 240)),
    "purple": ((128, 0, 128), (120, 40, 180), (140, 30, 200)),
    "pink": ((255, 120, 180), (255, 150, 200), (255, 105, 180)),
    "brown": ((120, 70, 20), (139, 69, 19), (100, 55, 25)),
    "black": ((0, 0, 0), (15, 15, 15), (30, 28, 30)),
    "white": ((255, 255, 255), (248, 248, 248), (240, 240, 238)),
    "gray": ((128, 128, 128), (150, 150, 150), (110, 110, 112)),
}
BACKGROUNDS = {  # no question asks for "pale" and "dark", which are no names of colours
    **COLOURS,
    "pale": ((225, 235, 250), (250, 240, 225), (230, 245, 230), (245, 230, 240), (215, 215, 220)),
    "dark": ((20, 25, 50), (45, 20, 25), (20, 45, 30), (50, 50, 55)),
}
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Thing:
    """A shape, or a text if `text` is not empty."""

    shape: str
    text: str
    colour: str
    rgb: Colour
    x: float  # centre, in pixels
    y: float
    radius: float  # shape: distance to its farthest point; text: half the height of a letter; in pixels
    turn: float  # rotation in degrees, clockwise


@dataclass(frozen=True)
class Scene:
    ground: str  # name of the background's colour; "": it has no single colour
    from_rgb: Colour
    to_rgb: Colour  # the background changes gradually from from_rgb to to_rgb
    direction: float  # of the gradient, in degrees
    noise: float  # largest deviation of a pixel from its colour, in steps of 255
    noise_at: int  # offset into the table of noise
    things: tuple[Thing, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Scene:
        things = tuple(Thing(**{**thing, "rgb": tuple(thing["rgb"])}) for thing in stored["things"])
        colours = {name: tuple(stored[name]) for name in ("from_rgb", "to_rgb")}
        return cls(**{**stored, **colours, "things": things})


def draw(scene: Scene) -> np.ndarray:
    """uint8 [SIZE, SIZE, 3]"""
    canvas = _ground(scene)
    for thing in scene.things:
        box, cover = _cover(thing)
        patch = canvas[box]
        patch += cover[..., None] * (np.array(thing.rgb, dtype=np.float32) - patch)
    if scene.noise:
        canvas += scene.noise * _noise(scene.noise_at)
    return np.clip(canvas + 0.5, 0, 255).astype(np.uint8)


def patch_labels(scene: Scene) -> np.ndarray:
    """Shape, colour and character on each patch; 0: none.  int64 [3, GRID, GRID]"""
    labels = np.zeros((3, GRID, GRID), dtype=np.int64)
    step = SIZE / GRID
    v, u = np.meshgrid(*[np.arange(GRID, dtype=np.float32) * step + step / 2] * 2, indexing="ij")
    for thing in scene.things:
        right, down = _turned(thing, u, v)
        if not thing.text:
            inside = np.hypot(right, down) < 0.8 * thing.radius
            labels[0][inside] = 1 + SHAPES.index(thing.shape)
        else:
            dot = thing.radius * 2 / font.HEIGHT
            place = np.floor((right / dot + font.width_of(thing.text) / 2 + 0.5) / font.ADVANCE)
            inside = (np.abs(down) < thing.radius) & (place >= 0) & (place < len(thing.text))
            characters = [1 + font.CHARACTERS.index(c) for c in thing.text]
            labels[2][inside] = np.array(characters)[place[inside].astype(int)]
        labels[1][inside] = 1 + list(COLOURS).index(thing.colour)
    return labels


def half_size(thing: Thing) -> tuple[float, float]:
    """Half the width and half the height of a box around the thing, rotation included."""
    if not thing.text:
        return thing.radius, thing.radius
    wide = thing.radius * font.width_of(thing.text) / font.HEIGHT
    sin, cos = (abs(f(np.radians(thing.turn))) for f in (np.sin, np.cos))
    return float(wide * cos + thing.radius * sin), float(wide * sin + thing.radius * cos)


def _ground(scene: Scene) -> np.ndarray:
    """float32 [SIZE, SIZE, 3]"""
    start, end = (np.array(rgb, dtype=np.float32) for rgb in (scene.from_rgb, scene.to_rgb))
    if scene.from_rgb == scene.to_rgb:
        return np.broadcast_to(start, (SIZE, SIZE, 3)).copy()
    angle = np.radians(scene.direction)
    steps = (np.arange(SIZE, dtype=np.float32) + 0.5) / SIZE - 0.5
    along = np.float32(np.cos(angle)) * steps[None, :] + np.float32(np.sin(angle)) * steps[:, None]
    part = np.clip(along / np.float32(1.4) + np.float32(0.5), 0, 1)
    return start + part[..., None] * (end - start)


def _cover(thing: Thing) -> tuple[tuple[slice, slice], np.ndarray]:
    """The box of pixels that a thing touches, and the covered share of each pixel, 0 to 1."""
    half_width, half_height = half_size(thing)
    left, right = _span(thing.x, half_width)
    top, bottom = _span(thing.y, half_height)
    x = np.arange(left, right, dtype=np.float32)[None, :] + 0.5
    y = np.arange(top, bottom, dtype=np.float32)[:, None] + 0.5
    box = (slice(top, bottom), slice(left, right))
    if thing.text:
        return box, _text_cover(thing, x, y)
    u, v = _turned(thing, x, y)
    distance = OUTLINES[thing.shape](u / thing.radius, v / thing.radius) * thing.radius
    return box, np.clip(0.5 - distance, 0, 1)


def _span(centre: float, half: float) -> tuple[int, int]:
    return max(0, int(centre - half - 2)), min(SIZE, int(centre + half + 3))


def _turned(thing: Thing, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pixels relative to the thing's centre, rotated back by the thing's rotation."""
    angle = np.radians(thing.turn)
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    right, down = x - np.float32(thing.x), y - np.float32(thing.y)
    return cos * right + sin * down, cos * down - sin * right


def _text_cover(thing: Thing, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    dots = font.dots(thing.text)
    height, width = dots.shape
    size = np.float32(thing.radius * 2 / font.HEIGHT)
    cover = np.zeros(np.broadcast_shapes(x.shape, y.shape), dtype=np.float32)
    for nudge_x, nudge_y in ((-0.25, -0.25), (0.25, -0.25), (-0.25, 0.25), (0.25, 0.25)):
        u, v = _turned(thing, x + np.float32(nudge_x), y + np.float32(nudge_y))
        column = np.clip(u / size + np.float32(width / 2), 0, width - 1).astype(np.int32)
        row = np.clip(v / size + np.float32(height / 2), 0, height - 1).astype(np.int32)
        cover += dots[row, column]
    return cover / 4


def _noise_tile() -> np.ndarray:
    """Noise from integer arithmetic, which is the same on every machine.  float32 [2 SIZE * SIZE * 3]"""
    mixed = np.arange(2 * SIZE * SIZE * 3, dtype=np.uint32)
    for _ in range(3):
        mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x45D9F3B)
    mixed ^= mixed >> np.uint32(16)
    halves = (mixed & np.uint32(0xFFFF)).astype(np.float32), (mixed >> np.uint32(16)).astype(np.float32)
    return (halves[0] + halves[1]) / np.float32(65535) - 1


NOISE = _noise_tile()


def _noise(at: int) -> np.ndarray:
    count = SIZE * SIZE * 3
    return NOISE[at % count : at % count + count].reshape(SIZE, SIZE, 3)


# Outlines: signed distance from the edge of a shape of radius 1; negative inside. u: right, v: down.
def _circle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.hypot(u, v) - 1


def _square(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(u), np.abs(v)) - np.float32(0.72)


def _triangle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    slanted = np.float32(0.8660254) * np.abs(u) - np.float32(0.5) * v
    return np.maximum(slanted, v) - np.float32(0.5)


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    fifth = np.float32(2 * np.pi / 5)
    angle = np.arctan2(u, -v)
    angle = np.abs(angle - fifth * np.round(angle / fifth))  # 0 at a point of the star, fifth / 2 between two
    length = np.hypot(u, v)
    inner = np.array([0.42 * np.cos(np.pi / 5), 0.42 * np.sin(np.pi / 5)])
    edge = inner - np.array([1.0, 0.0])
    normal = np.array([-edge[1], edge[0]]) / -np.hypot(*edge)
    along, across = length * np.cos(angle), length * np.sin(angle)
    return np.float32(normal[0]) * (along - 1) + np.float32(normal[1]) * across


def _ring(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.abs(np.hypot(u, v) - np.float32(0.78)) - np.float32(0.22)


def _cross(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    u, v = np.abs(u), np.abs(v)
    thick, long = np.float32(0.3), np.float32(0.95)
    return np.minimum(np.maximum(u - thick, v - long), np.maximum(u - long, v - thick))


def _diamond(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    steep = np.float32(1 / 0.62)
    return (np.abs(u) * steep + np.abs(v) - 1) / np.hypot(steep, np.float32(1))


def _heart(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    side = np.float32(0.55)
    root = np.float32(np.sqrt(0.5))
    a, b = (u - v + np.float32(0.2)) * root, (-u - v + np.float32(0.2)) * root  # up right, up left
    body = np.maximum(np.abs(a), np.abs(b)) - side
    lobes = np.minimum(np.hypot(a - side, b), np.hypot(a, b - side)) - side
    return np.minimum(body, lobes)


def _arrow(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    v = np.abs(v)
    shaft = np.maximum(np.maximum(v - np.float32(0.22), -u - np.float32(0.95)), u - np.float32(0.2))
    slope = np.float32(0.75)
    tip = np.maximum(-u, (v - slope * (1 - u)) / np.hypot(slope, np.float32(1)))
    return np.minimum(shaft, tip)


def _crescent(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    bite = np.float32(0.8) - np.hypot(u - np.float32(0.5), v)
    return np.maximum(np.hypot(u, v) - 1, bite)


OUTLINES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "ring": _ring,
    "cross": _cross,
    "diamond": _diamond,
    "heart": _heart,
    "arrow": _arrow,
    "crescent": _crescent,
}
