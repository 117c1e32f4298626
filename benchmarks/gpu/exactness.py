"""Whether drafts leave every token as it is on this device: tiny float32 models, several rows, prints JSON.

    python -m benchmarks.gpu.exactness

A process of its own, since float32 products must not be rounded to TF32, which has to be said at the start.
"""

from __future__ import annotations

import json
import os

import mlx.core as mx

from benchmarks.gpu.loop import prompts
from benchmarks.gpu.weights import Subject, random_subject
from benchmarks.side_by_side import NoText
from outrider.config import EngineConfig
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence as Row
from outrider.models import machine
from outrider.request import Request, SamplingParams
from outrider.speculate.ngram import NgramDrafter
from outrider.step.runner import Runner

ROWS, NUM_TOKENS, DEPTH = 5, 96, 3


def check(subject: Subject, temperature: float = 0.0) -> dict[str, object]:
    runner = Runner(subject.trunk, subject.head)
    plain, _ = _decode(runner, subject, 0, temperature)
    drafted, rows = _decode(runner, subject, DEPTH, temperature)
    places = [_first_difference(a, b) for a, b in zip(plain, drafted, strict=True)]
    return {
        "equal": plain == drafted,
        "first_difference": places,
        "drafts_fed": sum(sum(row.drafted) for row in rows),
        "drafts_accepted": sum(sum(row.accepted) for row in rows),
    }


def _decode(
    runner: Runner, subject: Subject, depth: int, temperature: float
) -> tuple[list[list[int]], list[Row]]:
    """Drafts come from the row's own text, which a tiny model repeats, and from the head where that has none."""
    config = EngineConfig(max_rows=ROWS, prefill_step_size=64)
    scheduler = Scheduler(config, runner.geometry(256), machine.cache_budget_bytes())
    rows = []
    for i, prompt in enumerate(prompts(subject.trunk.vocab_size, ROWS, 24 + ROWS)):
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=i, ignore_eos=True)
        request = Request(str(i), tuple(prompt[: 24 + i]), params)
        lookup = NgramDrafter(depth) if depth else None
        row = Row(
            i, request, NoText(), frozenset(), NUM_TOKENS, max_depth=depth, head_depth=depth, lookup=lookup
        )
        rows.append(row)
        scheduler.add(row)
    while not scheduler.is_idle:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(runner.run(plan))
    runner.reset()
    return [row.tokens for row in rows], rows


def _first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def main() -> None:
    os.environ["MLX_ENABLE_TF32"] = "0"
    machine.settle()
    found = {
        f"{name} T{temperature:g}": check(random_subject(name, "f32"), temperature)
        for name in ("tiny-dense-4b", "tiny-4b")
        for temperature in (0.0, 0.8)
    }
    print(json.dumps({"device": str(mx.default_device()), "results": found}))


if __name__ == "__main__":
    main()
