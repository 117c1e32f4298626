"""The figures as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outrider.bench.rounds import Measured
from outrider.bench.statistics import Spread
from outrider.bench.summary import ArmFigures, Latency, figures

NONE = "-"


def table(measured: Sequence[Measured], arms: Sequence[str], baselines: Sequence[str]) -> str:
    """One block a workload and temperature; every arm beneath the other for each number of streams."""
    blocks: dict[tuple[str, float], list[Measured]] = {}
    for one in measured:
        if one.rounds:
            blocks.setdefault((one.case.workload.name, one.case.temperature), []).append(one)
    return "\n\n".join(_block(members, arms, baselines) for members in blocks.values())


def _block(members: Sequence[Measured], arms: Sequence[str], baselines: Sequence[str]) -> str:
    case = members[0].case
    told = [
        (one.case.streams, found)
        for one in members
        for arm in arms
        if (found := figures(one, arm, baselines)) is not None
    ]
    rows = [_row(streams, found, baselines) for streams, found in told]
    for earlier, later in zip(rows[-2::-1], rows[:0:-1], strict=True):
        if later[0] == earlier[0]:
            later[0] = ""
    title = f"{case.workload.name} ({case.workload.about}), temperature {case.temperature:g}"
    return "\n".join([title, _aligned([_headings(baselines), *rows]), *_notes(told, case.workload.name)])


def _headings(baselines: Sequence[str]) -> list[str]:
    return [
        "streams",
        "arm",
        "tokens/s",
        *(f"/ {name}" for name in baselines),
        "first token ms",
        "a token ms",
        "stride",
        "accepted by place",
        "ended",
        "peak MB",
    ]


def _row(streams: int, found: ArmFigures, baselines: Sequence[str]) -> list[str]:
    ratios = [NONE if name == found.arm else _spread(found.ratios[name], 2) for name in baselines]
    return [
        str(streams),
        found.arm,
        _spread(found.tokens_per_s, 1),
        *ratios,
        _latency(found.ttft, 0),
        _latency(found.inter_token, 1),
        NONE if found.stride is None else f"{found.stride:.2f}",
        " ".join(f"{share:.2f}" for share in found.acceptance or ()) or NONE,
        f"{found.num_stopped}/{found.num_answers}",
        NONE if found.peak_bytes is None else f"{found.peak_bytes / 1e6:.0f}",
    ]


def _spread(spread: Spread | None, digits: int) -> str:
    return NONE if spread is None else spread.told(digits)


def _latency(latency: Latency, digits: int) -> str:
    if latency.p50_s is None or latency.p95_s is None:
        return NONE
    return f"{latency.p50_s * 1000:.{digits}f} / {latency.p95_s * 1000:.{digits}f}"


def _notes(told: Iterable[tuple[int, ArmFigures]], workload: str) -> list[str]:
    notes = []
    for streams, found in told:
        where = f"  {streams} {'stream' if streams == 1 else 'streams'}, {found.arm}: "
        if workload == "mixed":
            paces = ", ".join(f"{kind} {_latency(pace, 1)}" for kind, pace in found.pace_by_kind.items())
            notes.append(f"{where}a token ms by row: {paces}")
        if found.json_valid is not None and found.json_valid[0] < found.json_valid[1]:
            valid, ended = found.json_valid
            notes.append(f"{where}{ended - valid} of {ended} answers that had to be JSON are none")
        if found.cached_share:
            notes.append(f"{where}{found.cached_share:.0%} of the prompts came from a cache")
        notes += [f"{where}{count} failed: {error}" for error, count in found.errors.items()]
    return notes


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


LEGEND = """tokens/s: all streams, from the first request to the last answer's end; median (least-most).
/ X: the same, round by round, over X's. first token, a token: p50 / p95 over all answers; tokens that come
together share the time since those before them. stride: tokens that a row gains in a decode step.
ended: answers that the model ended itself."""
