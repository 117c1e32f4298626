"""The figures as one markdown table: for each load a row for each server, Outrider first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.native_mtp.loads import Load
from benchmarks.native_mtp.results import Cell, Figures, figures, ratios
from outrider.bench.statistics import Spread

UNKNOWN = "-"
COLUMNS = (
    "load",
    "server",
    "MTP, tokens/s",
    "plain, tokens/s",
    "MTP / plain",
    "{first} with MTP / this server with MTP",
    "answers with MTP equal to plain alone",
    "plain answers equal to plain alone",
    "errors",
)
MAX_REASON = 200  # characters of an error in the table; chosen by hand


def table(
    cells: Sequence[Cell],
    servers: Sequence[str],
    loads: Sequence[Load],
    not_measured: Iterable[tuple[str, str]],
) -> str:
    """`servers`: the first one is compared with the others.

    `not_measured`: servers and the reason why they, or their MTP, were not measured to the end.
    """
    first = servers[0]
    head = [column.format(first=first.split()[0]) for column in COLUMNS]
    lines = [_line(head), _line(["---"] * len(COLUMNS))]
    for load in loads:
        shown = load.text
        for server in servers:
            found = figures(cells, server, load)
            if found.with_mtp is None and found.plain is None and not found.errors:
                continue
            beside = None if server == first else _beside(cells, first, server, load)
            lines.append(_line([shown, server, *_figures_text(found, beside)]))
            shown = ""
    for server, reason in not_measured:
        lines.append(_line(["all", server, *[UNKNOWN] * (len(COLUMNS) - 3), _short(reason)]))
    return "\n".join(lines)


def _figures_text(found: Figures, beside: Spread | None) -> list[str]:
    return [
        _median(found.with_mtp),
        _median(found.plain),
        _ratio(found.ratio),
        _ratio(beside),
        _share(found.equal_with_mtp),
        _share(found.equal_plain),
        _errors_text(found),
    ]


def _beside(cells: Sequence[Cell], first: str, server: str, load: Load) -> Spread | None:
    drafting = [cell for cell in cells if cell.has_mtp and cell.load == load]
    ours = [cell for cell in drafting if cell.server == first]
    return Spread.of(ratios(ours, [cell for cell in drafting if cell.server == server]))


def _errors_text(found: Figures) -> str:
    parts = [f"{count} x {_short(error)}" for error, count in found.errors.items()]
    if found.num_crashes:
        parts.append(f"{found.num_crashes} crashes")
    return "; ".join(parts) or "0"


def _median(spread: Spread | None) -> str:
    return UNKNOWN if spread is None else f"{spread.median:.0f}"


def _ratio(spread: Spread | None) -> str:
    """One round has no spread."""
    if spread is None:
        return UNKNOWN
    return f"{spread.median:.2f}" if spread.least == spread.most else spread.text(2)


def _share(equal: tuple[int, int]) -> str:
    return f"{equal[0]} of {equal[1]}" if equal[1] else UNKNOWN


def _short(reason: str) -> str:
    """One line that cannot break the table."""
    line = " ".join(reason.split()).replace("|", "/")
    return line if len(line) <= MAX_REASON else line[: MAX_REASON - 3] + "..."


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
