"""The figures as pictures: for each workload and temperature tokens/s by streams, and the ratio beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.bench.chart import COLOURS, Chart, Point, Series, document
from outrider.bench.rounds import Measured
from outrider.bench.statistics import Spread
from outrider.bench.summary import ArmFigures, figures
from outrider.config import InvalidConfig

SUFFIXES = (".svg", ".png")


def check_plot_file(file: Path) -> None:
    """Raises InvalidConfig, before anything is measured, if the picture could not be drawn."""
    if file.suffix.lower() not in SUFFIXES:
        raise InvalidConfig(f"--plot {file}: name a file that ends with .svg or .png")
    if file.suffix.lower() == ".png":
        _png_renderer()


def write_plot(
    file: Path, measured: Sequence[Measured], arms: Sequence[str], baselines: Sequence[str]
) -> None:
    svg = draw(measured, arms, baselines)
    if file.suffix.lower() == ".png":
        file.write_bytes(_png_renderer()(bytestring=svg.encode(), scale=2))
    else:
        file.write_text(svg)


def draw(measured: Sequence[Measured], arms: Sequence[str], baselines: Sequence[str]) -> str:
    blocks: dict[tuple[str, float], list[Measured]] = {}
    for one in measured:
        if one.rounds:
            blocks.setdefault((one.case.workload.name, one.case.temperature), []).append(one)
    charts = []
    for (workload, temperature), members in blocks.items():
        where = f"{workload}, temperature {temperature:g}"
        charts.append(
            _chart(f"{where}: tokens/s", members, arms, baselines, lambda found: found.tokens_per_s)
        )
        for name in baselines:
            ratio = _chart(f"{where}: speed over {name}", members, arms, baselines, _ratio_to(name), 1.0)
            charts.append(ratio)
    return document(charts, 1 + len(baselines), "dots: medians; whiskers: least and most of the rounds")


def _ratio_to(baseline: str) -> Callable[[ArmFigures], Spread | None]:
    return lambda found: None if found.arm == baseline else found.ratios[baseline]


def _chart(
    title: str,
    members: Sequence[Measured],
    arms: Sequence[str],
    baselines: Sequence[str],
    value: Callable[[ArmFigures], Spread | None],
    mark: float | None = None,
) -> Chart:
    series = []
    for place, arm in enumerate(arms):
        points = []
        for x, one in enumerate(members):
            found = figures(one, arm, baselines)
            spread = None if found is None else value(found)
            if spread is not None:
                points.append(Point(x, spread.median, spread.least, spread.most))
        if points:
            series.append(Series(arm, tuple(points), COLOURS[place % len(COLOURS)]))
    ticks = tuple(str(one.case.streams) for one in members)
    return Chart(title, "streams", ticks, tuple(series), mark)


def _png_renderer() -> Callable[..., bytes]:
    try:
        from cairosvg import svg2png
    except (ImportError, OSError) as error:  # OSError: the package is there, the cairo library is not
        raise InvalidConfig(
            f"a PNG needs the package cairosvg (pip install 'outrider[plot]'): {error}. "
            "A file that ends with .svg needs nothing."
        ) from None
    return svg2png
