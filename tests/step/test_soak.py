"""Drafter invariance for as long as asked: OUTRIDER_SOAK_SECONDS=3600 pytest -m soak -s (or `make soak`)."""

from __future__ import annotations

import itertools
import os
import secrets
import time

import pytest

from step.histories import Tally, play, random_history, world

SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "0"))
REPORT_S = 30
FAMILIES = (
    "llama", "qwen3", "llama-4bit", "gemma3_text", "llama", "deepseek_v3", "qwen3-mixed", "gpt_oss",
    "llama-6bit", "glm4_moe", "qwen3_moe-5bit", "gpt_oss-8bit", "gpt_oss-mxfp4", "deepseek_v3-4bit",
    "llama-4bit kv16", "llama-4bit kv8", "llama-4bit kv4", "qwen3_5-4bit kv8", "llama kv4",
    "qwen3-5bit_128g",
)  # fmt: skip


@pytest.mark.soak
@pytest.mark.skipif(SECONDS <= 0, reason="runs under `make soak` only")
@pytest.mark.timeout(0)
def test_invariance_holds_as_long_as_asked() -> None:
    first_seed = secrets.randbits(40)
    tally = Tally()
    started = reported = time.monotonic()
    for number, family in enumerate(itertools.cycle(FAMILIES)):
        seed = first_seed + number
        try:
            tally.add(play(world(family), random_history(seed, world(family).vocab_size)))
        except Exception as error:
            error.add_note(
                f"To play it again: OUTRIDER_HISTORY={family}:{seed} pytest -s tests/step -k again"
            )
            raise
        now = time.monotonic()
        if now - reported > REPORT_S:
            reported = now
            print(f"{now - started:.0f} s: {tally.summary()}", flush=True)
        if now - started > SECONDS:
            break
    print(tally.summary())
    assert tally.excused * 10_000 <= max(tally.tokens, 10_000)
