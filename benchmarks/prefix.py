"""The savings of the prefix cache: `python -m benchmarks.prefix [MODEL]`. Ratios within one run.

1. A conversation of about 2,000 tokens, then its second turn: time to first token over the first turn's.
2. Eight concurrent requests that share a system prompt of 1,000 tokens: prompt tokens computed, over their
   number if the system prompt is computed once.
3. Decoding with the cache on and off.
4. The second turn after a restart, from disk.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from typing import Any

from outrider import LLM, SamplingParams
from outrider.plan import StepPlan, StepResult

TURN_TOKENS = 2000  # of the first turn of a conversation
SHARED_TOKENS = 1000  # of the shared system prompt
OWN_TOKENS = 50  # of each question after it, and of a second turn
NUM_SHARING = 8  # concurrent requests
ROUNDS = 2


class PrefillCount:
    """Counts the prompt tokens that steps compute."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def on_step(self, plan: StepPlan, result: StepResult, *_: Any) -> None:
        rows = [row for batch in plan.batches for row in batch]
        self.num_tokens += sum(row.num_fed for row in rows if row.start < row.num_prompt)


def text_of(num_tokens: int, seed: int, vocab_size: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, min(20_000, vocab_size)) for _ in range(num_tokens)]


def first_token_s(llm: LLM, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first token by the clock, and CPU seconds, which other busy processes do not change."""
    worked_s = time.process_time()
    completion = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))[0]
    assert completion.stats.ttft_s is not None
    return completion.stats.ttft_s, time.process_time() - worked_s


def second_turn(llm: LLM) -> None:
    ratios = []
    for number in range(ROUNDS):
        prompt = text_of(TURN_TOKENS, number, llm.engine.facts.vocab_size)
        follow_up = prompt + text_of(OWN_TOKENS, 100 + number, llm.engine.facts.vocab_size)
        first, second, again = (first_token_s(llm, ids) for ids in (prompt, follow_up, prompt))
        ratios.append((second[0] / first[0], second[1] / first[1]))
        for name, (clock_s, worked_s) in {"first": first, "second turn": second, "again": again}.items():
            print(f"  {name}: {clock_s:.3f} s, {worked_s:.3f} CPU seconds")
    clock, work = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(f"second turn: {clock:.1%} of the first turn's time to first token, {work:.1%} of its CPU time")


def after_restart(model: str | None, folder: str) -> None:
    prompt = []
    for life in ("first", "second"):
        with LLM(model, prefix_cache_dir=folder) as llm:
            prompt = prompt or text_of(TURN_TOKENS, 7, llm.engine.facts.vocab_size)
            seconds, worked_s = first_token_s(llm, prompt)
            print(f"  {life} life: first token after {seconds:.2f} s, {worked_s:.2f} CPU seconds")


def sharing(llm: LLM, count: PrefillCount) -> None:
    vocab_size = llm.engine.facts.vocab_size
    system = text_of(SHARED_TOKENS, 50, vocab_size)
    prompts = [system + text_of(OWN_TOKENS, 60 + i, vocab_size) for i in range(NUM_SHARING)]
    count.num_tokens = 0
    llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    once = SHARED_TOKENS + NUM_SHARING * OWN_TOKENS
    computed = count.num_tokens
    print(
        f"{NUM_SHARING} at once: {computed} prompt tokens computed, {computed / once:.3f} of the least number"
    )


def decoding(with_cache: LLM, without: LLM) -> None:
    params = SamplingParams(max_tokens=130, temperature=0, ignore_eos=True, draft_depth=0)
    ratios = []
    for number in range(2 * ROUNDS):
        speeds = {}
        prompts = [text_of(16, 1000 + 10 * number + i, with_cache.engine.facts.vocab_size) for i in range(4)]
        order = [("on", with_cache), ("off", without)]
        for name, llm in order if number % 2 else reversed(order):
            started_s = time.process_time()
            done = llm.generate(prompts, params)
            speeds[name] = sum(len(one.token_ids) for one in done) / (time.process_time() - started_s)
        ratios.append(speeds["on"] / speeds["off"])
        print(f"  {speeds['on']:.2f} tokens per CPU second with the cache, {speeds['off']:.2f} without")
    print(f"decoding with the cache on: {statistics.median(ratios):.3f} of off")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    count = PrefillCount()
    with LLM(model) as llm:
        llm.engine._loop._observer = count
        second_turn(llm)
        sharing(llm, count)
        with LLM(model, prefix_cache_bytes=0) as without:
            decoding(llm, without)
    with tempfile.TemporaryDirectory() as folder:
        after_restart(model, folder)


if __name__ == "__main__":
    main()
