"""A line chart as SVG: one line a series, a whisker a point. Knows nothing of benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 34, 40  # margins around the plotting area
# Readable side by side for those who do not see all colours (Okabe and Ito's set).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True)
class Point:
    x: int  # an index into the chart's ticks
    y: float
    least: float
    most: float


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]
    colour: str


@dataclass(frozen=True)
class Chart:
    title: str
    x_label: str
    ticks: tuple[str, ...]  # along x, evenly spaced
    series: tuple[Series, ...]
    mark: float | None = None  # a dashed line at this height


def document(charts: Sequence[Chart], columns: int, footer: str) -> str:
    """All charts in a grid, on white, whole by itself."""
    num_rows = -(-len(charts) // columns)
    width, height = columns * WIDTH, num_rows * HEIGHT + 24
    placed = (
        f'<g transform="translate({i % columns * WIDTH},{i // columns * HEIGHT})">{_chart(chart)}</g>'
        for i, chart in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(placed)
        + f"\n{_text(LEFT, height - 8, footer, fill='#555')}\n</svg>\n"
    )


def nice_step(top: float, most_steps: int = 5) -> float:
    """1, 2 or 5 times a power of ten, so that at most so many reach `top`."""
    if top <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(top / most_steps))
    return next(step * power for step in (1, 2, 5, 10) if step * power * most_steps >= top * (1 - 1e-9))


def _chart(chart: Chart) -> str:
    top = max((p.most for series in chart.series for p in series.points), default=1.0)
    top = max(top, chart.mark or 0.0) or 1.0
    step = nice_step(top)
    scale = math.ceil(top / step - 1e-9) * step
    plot_height = HEIGHT - TOP - BOTTOM

    def y_of(value: float) -> float:
        return round(TOP + plot_height * (1 - value / scale), 1)

    parts = [_text(LEFT, 16, chart.title, **{"font-weight": "bold"})]
    for i in range(round(scale / step) + 1):
        y = y_of(i * step)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "#e0e0e0"))
        parts.append(_text(LEFT - 6, y + 4, f"{i * step:g}", **{"text-anchor": "end"}))
    if chart.mark is not None:
        y = y_of(chart.mark)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "#888", dash="4 3"))
    for i, tick in enumerate(chart.ticks):
        parts.append(_text(_x_of(chart, i), HEIGHT - BOTTOM + 15, tick, **{"text-anchor": "middle"}))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 10, chart.x_label, **{"text-anchor": "end"}, fill="#555"))
    for series in chart.series:
        parts += _drawn(chart, series, y_of)
    parts += _legend(chart)
    return "\n".join(parts)


def _drawn(chart: Chart, series: Series, y_of: Callable[[float], float]) -> list[str]:
    spots = [(_x_of(chart, p.x), y_of(p.y), y_of(p.least), y_of(p.most)) for p in series.points]
    path = " ".join(f"{x},{y}" for x, y, _, _ in spots)
    line = f'<polyline points="{path}" fill="none" stroke="{series.colour}" stroke-width="2"/>'
    whiskers = [_line(x, low, x, high, series.colour) for x, _, low, high in spots]
    dots = [f'<circle cx="{x}" cy="{y}" r="3" fill="{series.colour}"/>' for x, y, _, _ in spots]
    return [line, *whiskers, *dots]


def _legend(chart: Chart) -> list[str]:
    parts, x = [], LEFT
    for series in chart.series:
        parts.append(f'<rect x="{x}" y="{HEIGHT - 18}" width="10" height="10" fill="{series.colour}"/>')
        parts.append(_text(x + 14, HEIGHT - 9, series.name))
        x += 26 + round(6.2 * len(series.name))
    return parts


def _x_of(chart: Chart, index: int) -> float:
    room = (WIDTH - LEFT - RIGHT) / max(1, len(chart.ticks))
    return round(LEFT + room * (index + 0.5), 1)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"{dashes}/>'


def _text(x: float, y: float, text: str, **attributes: str) -> str:
    given = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f'<text x="{x}" y="{y}"{given}>{escape(text)}</text>'
