"""mlx-lm's generators on the same model: generate_step for one row, BatchGenerator for more."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step

from benchmarks.gpu.driver import Spent
from benchmarks.gpu.loop import MIN_STEPS, WARM_STEPS, Load, TimedRun, prompts
from benchmarks.gpu.weights import Subject
from outrider.models.layer_swaps import without_speed_swaps


def mlx_lm_turn(subject: Subject, load: Load) -> TimedRun:
    """Plain greedy decoding with mlx-lm's own layers, from when all rows decode."""
    with without_speed_swaps(subject.model):
        return _turn(subject, load)


def _turn(subject: Subject, load: Load) -> TimedRun:
    num_tokens = load.steps + 2 * WARM_STEPS + MIN_STEPS
    asked = prompts(subject.trunk.vocab_size, load.rows, load.num_prompt)
    if load.rows == 1:
        tokens = generate_step(mx.array(asked[0]), subject.model, max_tokens=num_tokens)
        return _timed(lambda: int(next(tokens)[0]) is not None, load)
    generator = BatchGenerator(
        subject.model,
        max_tokens=num_tokens + load.rows,
        completion_batch_size=load.rows,
        prefill_batch_size=load.rows,
    )
    generator.insert(asked, [num_tokens + load.rows] * load.rows)
    try:
        while len(generator.next_generated()) < load.rows:
            pass
        return _timed(lambda: len(generator.next_generated()) == load.rows, load)
    finally:
        generator.close()


def _timed(step: Callable[[], bool], load: Load) -> TimedRun:
    for _ in range(WARM_STEPS):
        step()
    began, busy, steps = time.perf_counter(), time.thread_time(), 0
    while steps < load.steps and (steps < MIN_STEPS or time.perf_counter() - began < load.seconds):
        if not step():
            raise RuntimeError("a row of mlx-lm's batch ended early")
        steps += 1
    seconds, busy = time.perf_counter() - began, time.thread_time() - busy
    return TimedRun(load.rows, seconds, steps, steps * load.rows, 0, Spent(), busy)
