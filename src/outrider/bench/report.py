"""What is printed in the end: the table, how to read it, and what a reader must know before believing it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from outrider.bench.rounds import Benchmark
from outrider.bench.summary import same_texts
from outrider.bench.table import LEGEND, table


def report(benchmark: Benchmark, baselines: Sequence[str], is_complete: bool) -> str:
    names = [arm.name for arm in benchmark.arms]
    body = table(benchmark.measured, names, baselines)
    if not body:
        return "Nothing was measured."
    head = "" if is_complete else "Interrupted: this is what was measured so far.\n\n"
    return "\n".join([head + body, "", LEGEND, *_remarks(benchmark)])


def _remarks(benchmark: Benchmark) -> list[str]:
    return [*_counting(benchmark), *_memory(benchmark), *_same_answers(benchmark)]


def _counting(benchmark: Benchmark) -> list[str]:
    """Whose word it is how many tokens there were."""
    sources: dict[str, set[str]] = {}
    for measured in benchmark.measured:
        for one in measured.rounds:
            sources.setdefault(one.arm, set()).update(a.token_source for a in one.answers if a.error is None)
    by_chunks = [arm for arm, found in sources.items() if "chunks" in found]
    if not by_chunks:
        return []
    return [f"{', '.join(by_chunks)}: sent no usage; a chunk was counted as one token."]


def _memory(benchmark: Benchmark) -> list[str]:
    targets = {arm.target.name: arm.target.memory_source for arm in benchmark.arms}
    told = [f"{name}: that of {source}" for name, source in targets.items() if source is not None]
    return [f"peak: the most memory in a round ({'; '.join(told)})."] if told else []


def _same_answers(benchmark: Benchmark) -> list[str]:
    """Drafts change the speed, not the answer: arms of one target are held against each other."""
    remarks = []
    for one, other in combinations(benchmark.arms, 2):
        if one.target is not other.target:
            continue
        equal = compared = 0
        for measured in benchmark.measured:
            if not measured.case.workload.is_fresh:
                found = same_texts(measured, one.name, other.name)
                equal, compared = equal + found[0], compared + found[1]
        if compared:
            remarks.append(f"{one.name} and {other.name} gave the same text {equal} times of {compared}.")
    return remarks
