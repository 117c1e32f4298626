"""Checks that drafts do not change any token on this device: tiny float32 models, several rows. Prints JSON.

    python -m benchmarks.gpu.exactness

It runs in a process of its own: float32 products must not be rounded to TF32, which MLX decides at its start.
"""

from __future__ import annotations

import json
import os

import mlx.core as mx

from benchmarks.gpu.driver import Driver
from benchmarks.gpu.loop import prompts
from benchmarks.gpu.weights import Subject, random_subject
from benchmarks.side_by_side import NullDetokenizer
from outrider.config import EngineConfig
from outrider.engine.draft_state import DraftState
from outrider.engine.memory_plan import plan_memory
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence as Row
from outrider.models import machine
from outrider.request import Request, SamplingParams
from outrider.speculate.controller import DepthController
from outrider.speculate.prediction import PredictionDrafter
from outrider.step.runner import Runner

ROWS, NUM_TOKENS, DEPTH = 5, 96, 3
ENDS_EARLIER = 12  # tokens: each row ends so much before the previous one, so that passes have padding rows
WRONG_EVERY = 7  # one token in so many of a predicted answer is wrong


def check(subject: Subject, temperature: float = 0.0) -> dict[str, object]:
    """Compares decoding one step at a time without drafts with three other ways to decode.

    predicted    drafts that are mostly right, taken from the first answers
    ahead        compiled and overlapped, without drafts
    ahead, head  compiled and overlapped, with the head's drafts
    """
    plain, _, _ = _decode(subject, temperature, outruns=False)
    runs = {
        "predicted": _decode(subject, temperature, outruns=False, depth=DEPTH, answers=plain),
        "ahead": _decode(subject, temperature, outruns=True),
        "ahead, head": _decode(subject, temperature, outruns=True, depth=DEPTH),
    }
    found: dict[str, object] = {"equal": all(tokens == plain for tokens, _, _ in runs.values())}
    for name, (tokens, rows, num_ahead) in runs.items():
        found[name] = {
            "first_difference": [_first_difference(a, b) for a, b in zip(plain, tokens, strict=True)],
            "drafts_fed": sum(sum(row.counters.drafted) for row in rows),
            "drafts_accepted": sum(sum(row.counters.accepted) for row in rows),
            "steps_ahead": num_ahead,
        }
    return found


def _decode(
    subject: Subject,
    temperature: float,
    outruns: bool,
    depth: int = 0,
    answers: list[list[int]] | None = None,
) -> tuple[list[list[int]], list[Row], int]:
    """Tokens, rows, and overlapped steps. Drafts come from `answers` if given, else from the head."""
    runner = Runner(subject.trunk, subject.head, compiles=outruns)
    config = EngineConfig(max_rows=ROWS, prefill_step_size=64)
    controller = DepthController(few_shapes=outruns)
    scheduler = Scheduler(
        config,
        runner.geometry(256),
        plan_memory(EngineConfig(), machine.free_bytes(), 0, False).rows,
        controller,
    )
    rows = []
    for i, prompt in enumerate(prompts(subject.trunk.vocab_size, ROWS, 24 + ROWS)):
        num_tokens = NUM_TOKENS - ENDS_EARLIER * i
        params = SamplingParams(max_tokens=num_tokens, temperature=temperature, seed=i, ignore_eos=True)
        request = Request(str(i), tuple(prompt[: 24 + i]), params)
        row = Row(i, request, NullDetokenizer(), frozenset(), num_tokens, DraftState(depth, depth))
        if answers is not None:
            own = answers[i][row.num_prompt :]
            wrong = [(t + (j % WRONG_EVERY == i)) % subject.trunk.vocab_size for j, t in enumerate(own)]
            row.drafting.drafter = PredictionDrafter(wrong, row.num_prompt)
        rows.append(row)
        scheduler.add(row)
    driver = Driver(scheduler, runner, ahead=outruns)
    driver.run_out()
    return [row.tokens for row in rows], rows, driver.num_ahead


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
