"""The whole benchmark as JSON: settings, versions, machine, targets, figures, and every round as it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.bench.answer import Answer, Round
from outrider.bench.rounds import Benchmark, Measured
from outrider.bench.summary import figures

FORMAT = 1  # raised when a reader of older records would misread a newer one
SECONDS_DIGITS = 5


def record(
    benchmark: Benchmark, baselines: Sequence[str], environment: dict[str, Any], is_complete: bool
) -> dict[str, Any]:
    targets = {arm.target.name: arm.target for arm in benchmark.arms}
    return {
        "format": FORMAT,
        "is_complete": is_complete,
        "environment": environment,
        "settings": asdict(benchmark.settings),
        "targets": {
            name: target.facts() | {"memory": target.memory_source} for name, target in targets.items()
        },
        "arms": [{"name": a.name, "target": a.target.name, "depth": a.depth} for a in benchmark.arms],
        "baselines": list(baselines),
        "cases": [_case(one, benchmark, baselines) for one in benchmark.measured if one.rounds],
    }


def write_record(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")


def _case(measured: Measured, benchmark: Benchmark, baselines: Sequence[str]) -> dict[str, Any]:
    case = measured.case
    found = [figures(measured, arm.name, baselines) for arm in benchmark.arms]
    return {
        "workload": case.workload.name,
        "streams": case.streams,
        "temperature": case.temperature,
        "figures": [asdict(one) for one in found if one is not None],
        "rounds": [_round(one) for one in measured.rounds],
    }


def _round(one: Round) -> dict[str, Any]:
    return {
        "arm": one.arm,
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
    told = asdict(answer)
    del told["text"], told["ended_s"]
    return told | {
        "started_s": round(answer.started_s - origin_s, SECONDS_DIGITS),
        "seconds": round(answer.ended_s - answer.started_s, SECONDS_DIGITS),
        "arrivals": [[round(a.s, SECONDS_DIGITS), round(a.num_tokens, 2)] for a in answer.arrivals],
    }
