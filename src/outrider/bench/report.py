"""The text at the end of a benchmark: the tables, how to read them, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from rich.console import Group, RenderableType
from rich.table import Table

from outrider.bench.rounds import Benchmark
from outrider.bench.summary import same_texts
from outrider.bench.table import LEGEND, tables
from outrider.terminal import new_table


def report(benchmark: Benchmark, baselines: Sequence[str], is_complete: bool) -> Group:
    names = [variant.name for variant in benchmark.variants]
    parts: list[RenderableType] = []
    for table in tables(benchmark.results, names, baselines):
        parts += [table, ""]
    if not parts:
        return Group("Nothing was measured.")
    if not is_complete:
        parts.insert(0, "Interrupted. These are the figures so far.\n")
    return Group(*parts, _legend(benchmark), *_token_counts(benchmark), *_equal_answers(benchmark))


def _legend(benchmark: Benchmark) -> Table:
    table = new_table("", "")
    for name, meaning in LEGEND.items():
        table.add_row(name, meaning)
    targets = {variant.target.name: variant.target.memory_source for variant in benchmark.variants}
    known = [f"{name}: memory of {source}" for name, source in targets.items() if source is not None]
    if known:
        table.add_row("peak MB", f"the most memory in use during a round ({'; '.join(known)})")
    return table


def _token_counts(benchmark: Benchmark) -> list[str]:
    sources: dict[str, set[str]] = {}
    for result in benchmark.results:
        for one in result.rounds:
            counted = {answer.token_source for answer in one.answers if answer.error is None}
            sources.setdefault(one.variant, set()).update(counted)
    by_chunks = [variant for variant, found in sources.items() if "chunks" in found]
    if not by_chunks:
        return []
    return [f"{', '.join(by_chunks)}: the server sent no usage, so each chunk was counted as one token."]


def _equal_answers(benchmark: Benchmark) -> list[str]:
    """Drafts change the speed, not the answer, so the variants of one target are compared with each other."""
    remarks = []
    for one, other in combinations(benchmark.variants, 2):
        if one.target is not other.target:
            continue
        equal = compared = 0
        for result in benchmark.results:
            if not result.case.workload.is_fresh:
                found = same_texts(result, one.name, other.name)
                equal, compared = equal + found[0], compared + found[1]
        if compared:
            remarks.append(
                f"{one.name} and {other.name} gave the same text in {equal} of {compared} answers."
            )
    return remarks
