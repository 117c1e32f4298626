"""The figures as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group

from outrider.bench.rounds import CaseResult
from outrider.bench.statistics import Spread
from outrider.bench.summary import Latency, VariantFigures, figures
from outrider.terminal import new_table, printable

UNKNOWN = "-"

LEGEND = {
    "tokens/s": "generated tokens of all streams per second, from the first request to the end of the last "
    "answer: median of the rounds (lowest-highest)",
    "/ X": "tokens/s divided by the tokens/s of X in the same round",
    "TTFT": "time to first token: p50 / p95 of all answers",
    "ITL": "inter-token latency: p50 / p95 of all tokens; tokens that arrive together share the time since "
    "the last arrival",
    "stride": "tokens that a row commits in one decode step",
    "accepted": "share of draft tokens that were accepted, by position in the draft",
    "stopped": "answers that the model ended itself, before --max-tokens",
}


def tables(results: Sequence[CaseResult], variants: Sequence[str], baselines: Sequence[str]) -> list[Group]:
    """One table for each workload and temperature; for each number of streams, one row per variant."""
    return [_block(members, variants, baselines) for members in by_workload(results)]


def by_workload(results: Iterable[CaseResult]) -> list[list[CaseResult]]:
    """Results with at least one round, grouped by workload and temperature."""
    groups: dict[tuple[str, float], list[CaseResult]] = {}
    for one in results:
        if one.rounds:
            groups.setdefault((one.case.workload.name, one.case.temperature), []).append(one)
    return list(groups.values())


def _block(members: Sequence[CaseResult], variants: Sequence[str], baselines: Sequence[str]) -> Group:
    case = members[0].case
    ratios = [f"/ {name}" for name in baselines]
    columns = ("stride", "accepted", "stopped", "peak MB")
    table = new_table("streams", "variant", "tokens/s", *ratios, "TTFT ms", "ITL ms", *columns)
    notes: list[str] = []
    for one in members:
        streams = str(one.case.streams)
        for variant in variants:
            found = figures(one, variant, baselines)
            if found is not None:
                table.add_row(streams, *_row(found, baselines))
                notes += _notes(one, found)
                streams = ""  # shown once, in the first row of its group
    title = f"{case.workload.name} ({case.workload.about}), temperature {case.temperature:g}"
    return Group(title, table, *notes)


def _row(found: VariantFigures, baselines: Sequence[str]) -> list[str]:
    ratios = [UNKNOWN if name == found.variant else _spread(found.ratios[name], 2) for name in baselines]
    return [
        found.variant,
        _spread(found.tokens_per_s, 1),
        *ratios,
        _latency(found.ttft, 0),
        _latency(found.inter_token, 1),
        UNKNOWN if found.stride is None else f"{found.stride:.2f}",
        " ".join(f"{share:.2f}" for share in found.acceptance or ()) or UNKNOWN,
        f"{found.num_stopped}/{found.num_answers}",
        UNKNOWN if found.peak_bytes is None else f"{found.peak_bytes / 1e6:.0f}",
    ]


def _spread(spread: Spread | None, digits: int) -> str:
    return UNKNOWN if spread is None else spread.text(digits)


def _latency(latency: Latency, digits: int) -> str:
    if latency.p50_s is None or latency.p95_s is None:
        return UNKNOWN
    return f"{latency.p50_s * 1000:.{digits}f} / {latency.p95_s * 1000:.{digits}f}"


def _notes(result: CaseResult, found: VariantFigures) -> list[str]:
    notes = []
    if result.case.workload.name in ("mixed", "arrivals"):
        paces = ", ".join(f"{kind} {_latency(pace, 1)}" for kind, pace in found.pace_by_kind.items())
        notes.append(f"ITL ms by kind of row: {paces}")
    if result.case.workload.name == "arrivals":
        longest = found.longest_stall_by_kind.get("free")
        first = ", ".join(f"{kind} {_latency(ttft, 0)}" for kind, ttft in found.ttft_by_kind.items())
        stall = UNKNOWN if longest is None else f"{longest * 1000:.0f}"
        notes.append(f"TTFT ms by kind of row: {first}; longest time without a token of a chat: {stall} ms")
    if result.case.workload.name == "long":
        notes += [
            f"TTFT / TTFT of {name}: {spread.text(2)}"
            for name, spread in found.ttft_ratios.items()
            if spread is not None and name != found.variant
        ]
    if found.json_valid is not None and found.json_valid[0] < found.json_valid[1]:
        valid, ended = found.json_valid
        notes.append(f"{ended - valid} of {ended} answers with a JSON schema are not valid JSON")
    if found.cached_share:
        notes.append(f"{found.cached_share:.0%} of the prompt tokens came from a cache")
    notes += [f"{count} failed: {printable(error)}" for error, count in found.errors.items()]
    streams = result.case.streams
    return [f"  {streams} stream{'s' if streams > 1 else ''}, {found.variant}: {note}" for note in notes]
