"""The whole benchmark as JSON: settings, versions, machine, targets, figures, and every round.

The keys of FORMAT 1 use the word "arm" for a variant.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.bench.answer import Answer, RoundResult
from outrider.bench.rounds import Benchmark, CaseResult
from outrider.bench.summary import figures

FORMAT = 1  # goes up when a reader of older records would misread a newer one
SECONDS_DIGITS = 5  # decimal places of times: ten microseconds


def record(
    benchmark: Benchmark, baselines: Sequence[str], environment: dict[str, Any], is_complete: bool
) -> dict[str, Any]:
    targets = {variant.target.name: variant.target for variant in benchmark.variants}
    return {
        "format": FORMAT,
        "is_complete": is_complete,
        "environment": environment,
        "settings": asdict(benchmark.settings),
        "targets": {
            name: target.facts() | {"memory": target.memory_source} for name, target in targets.items()
        },
        "arms": [{"name": v.name, "target": v.target.name, "depth": v.depth} for v in benchmark.variants],
        "baselines": list(baselines),
        "cases": [_case(one, benchmark, baselines) for one in benchmark.results if one.rounds],
    }


def write_record(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")


def _case(result: CaseResult, benchmark: Benchmark, baselines: Sequence[str]) -> dict[str, Any]:
    case = result.case
    found = [figures(result, variant.name, baselines) for variant in benchmark.variants]
    return {
        "workload": case.workload.name,
        "streams": case.streams,
        "temperature": case.temperature,
        "figures": [{"arm": one.pop("variant"), **one} for one in map(asdict, filter(None, found))],
        "rounds": [_round(one) for one in result.rounds],
    }


def _round(one: RoundResult) -> dict[str, Any]:
    return {
        "arm": one.variant,
        "index": one.index,
        "place": one.place,
        "seconds": round(one.seconds, SECONDS_DIGITS),
        "tokens_per_s": round(one.tokens_per_s, 3),
        "drafts": None if one.drafts is None else asdict(one.drafts),
        "peak_bytes": one.peak_bytes,
        "answers": [_answer(answer, one.answers[0].started_s) for answer in one.answers],
    }


def _answer(answer: Answer, origin_s: float) -> dict[str, Any]:
    """`arrivals` are [seconds since the request, tokens]."""
    values = asdict(answer)
    del values["text"], values["ended_s"]
    return values | {
        "started_s": round(answer.started_s - origin_s, SECONDS_DIGITS),
        "seconds": round(answer.ended_s - answer.started_s, SECONDS_DIGITS),
        "arrivals": [[round(a.s, SECONDS_DIGITS), round(a.num_tokens, 2)] for a in answer.arrivals],
    }
