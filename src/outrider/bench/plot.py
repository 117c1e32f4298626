"""The figures as a plot: for each workload and temperature, tokens/s by streams, and the ratios beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bench.rounds import CaseResult
from outrider.bench.statistics import Spread
from outrider.bench.summary import VariantFigures, figures
from outrider.bench.table import by_workload
from outrider.config import InvalidConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")
CHART_INCHES = (4.6, 2.8)  # width and height of one chart; chosen by hand
PNG_DPI = 160  # chosen by hand
# Distinct also for colour-blind readers (the set of Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
FOOTER = "dots: median of the rounds; bars: lowest and highest round"

Value = Callable[[VariantFigures], Spread | None]


def check_plot_file(file: Path) -> None:
    """Raises InvalidConfig, before anything is measured, if the plot could not be written."""
    if file.suffix.lower() not in SUFFIXES:
        raise InvalidConfig(f"--plot {file}: name a file that ends with .svg or .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidConfig(
            f"--plot needs the package matplotlib (pip install 'outrider[plot]'): {error}"
        ) from None


def write_plot(
    file: Path, results: Sequence[CaseResult], variants: Sequence[str], baselines: Sequence[str]
) -> None:
    """As PNG or SVG, by the file's suffix. Needs no display."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False, "svg.fonttype": "none", "font.size": 8}):
        draw(results, variants, baselines).savefig(file, dpi=PNG_DPI)


def draw(results: Sequence[CaseResult], variants: Sequence[str], baselines: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure  # draws without pyplot, which would look for a display

    groups = by_workload(results)
    num_rows, num_columns = max(1, len(groups)), 1 + len(baselines)
    size = (CHART_INCHES[0] * num_columns, CHART_INCHES[1] * num_rows)
    figure = Figure(size, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for row, members in zip(grid, groups, strict=False):
        case = members[0].case
        where = f"{case.workload.name}, temperature {case.temperature:g}"
        _chart(row[0], members, variants, baselines, lambda found: found.tokens_per_s)
        row[0].set_title(f"{where}: tokens/s")
        for axes, name in zip(row[1:], baselines, strict=True):
            _chart(axes, members, variants, baselines, _ratio_to(name))
            axes.axhline(1.0, color="#888888", linestyle="--", linewidth=1)
            axes.set_title(f"{where}: speed over {name}")
    figure.supxlabel(FOOTER, fontsize="small", color="#555555")
    return figure


def _ratio_to(baseline: str) -> Value:
    return lambda found: None if found.variant == baseline else found.ratios[baseline]


def _chart(
    axes: Axes,
    members: Sequence[CaseResult],
    variants: Sequence[str],
    baselines: Sequence[str],
    value: Value,
) -> None:
    """One line for each variant, with a bar from the lowest to the highest round at each point."""
    for number, variant in enumerate(variants):
        found = [figures(one, variant, baselines) for one in members]
        spreads = [(x, value(one)) for x, one in enumerate(found) if one is not None]
        points = [(x, spread) for x, spread in spreads if spread is not None]
        if not points:
            continue
        axes.errorbar(
            [x for x, _ in points],
            [spread.median for _, spread in points],
            yerr=[
                [spread.median - spread.least for _, spread in points],
                [spread.most - spread.median for _, spread in points],
            ],
            label=variant,
            color=COLOURS[number % len(COLOURS)],
            marker="o",
            markersize=4,
            capsize=2,
        )
    axes.set_xticks(range(len(members)), [str(one.case.streams) for one in members])
    axes.set_xlabel("streams")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e0e0e0")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
