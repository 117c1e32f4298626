"""Any history of joins, cancels, failures and preemptions leaves every request with its own true tokens."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from fake_runner import VOCAB_SIZE, Fault
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduler_harness import Harness

from outrider.engine.prompt_pacing import MIN_CHUNK
from outrider.engine.row_caches import SLACK
from outrider.plan import NUM_SPARE_BLOCKS, CacheGeometry
from outrider.request import MAX_DEPTH
from outrider.speculate.ngram import NgramDrafter
from patience import IN_SOAK, in_test_or_soak
from restless_controller import RestlessController

FAULTS: dict[str, Fault] = {
    "always": lambda row: True,
    "when it picks": lambda row: row.is_sampling,
    "after its first chunk": lambda row: row.start > 0,
    "in its answer": lambda row: row.start >= row.num_prompt,
    "from its third token on": lambda row: len(row.history) >= row.num_prompt + 3,
}

LOADED: list[int] = []  # cells that each history took from the prefix cache
RESTORED: list[int] = []  # rows of each history that got earlier recurrent states back

token_ids = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Of any length, as likely long as short; often repetitive, so that n-grams are found."""
    length = draw(st.sampled_from([1, 3, 10, 10, 20, 20, 40, 200]))
    period = draw(st.lists(token_ids, min_size=1, max_size=12))
    noise = random.Random(draw(st.integers(0, 2**16)))
    period += [noise.randrange(VOCAB_SIZE) for _ in range(noise.choice([0, 5, 200]))]
    return (period * length)[:length]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    depth = draw(st.integers(0, MAX_DEPTH))
    return {
        "prompt": draw(prompts()),
        "max_tokens": draw(st.sampled_from([1, 2, 10, 40, 80, 80, 80, 80])),
        "depth": depth,
        "is_auto": draw(st.booleans()),
        **draw(st.sampled_from([{}, {}, {"ngrams": True}, {"ngrams": True, "head_depth": depth}])),
        "stop_ids": draw(st.sampled_from([()] * 6 + [(3,), (3, 7)])),
        "min_tokens": draw(st.sampled_from([0, 0, 1, 5, 30])),
        "stop_token": draw(st.sampled_from([None] * 7 + [5])),
        "wakes": draw(st.sampled_from([(), (), (2,), (2, 9, 11)])),
        "fault": draw(st.sampled_from([None] * 45 + sorted(FAULTS))),
    }


@st.composite
def engines(draw: st.DrawFn) -> dict[str, Any]:
    """Engines of every shape, with memory for the longest row alone or for many rows."""
    capacity_step = draw(st.sampled_from([1, 2, 4, 8, 16, 48]))
    block_size = draw(st.sampled_from([2, 4, 8, 32]))
    geometry = CacheGeometry(
        draw(st.integers(1, 8)),
        draw(st.sampled_from([0, 100])),
        capacity_step,
        draw(st.sampled_from([None, block_size, block_size])),
    )
    longest = draw(st.sampled_from([50, 100, 280]))
    alone = geometry.num_bytes(1, geometry.capacity_for(longest + SLACK))
    if geometry.has_blocks:
        alone = geometry.num_bytes_in_blocks(1, NUM_SPARE_BLOCKS + geometry.blocks_for(longest + SLACK))
    return {
        "max_rows": draw(st.sampled_from([1, 2, 3, 4, 5, 6, 6, 6])),
        "prefill_step_size": draw(st.sampled_from([1, 5, 16, 32, 64, 64])),
        "geometry": geometry,
        "budget_bytes": int(alone * draw(st.sampled_from([1, 1.5, 1.5, 2, 2, 3, 10]))),
        "seed": draw(st.integers(0, 2**16)),
        "block_size": block_size,
        "min_loaded_cells": draw(st.sampled_from([1, 1, 5])),
        "prefix_bytes": draw(st.sampled_from([None, 50, 1000, 10**6, 10**6])),
        "plain_rows_store": draw(st.booleans()),
        "ahead": draw(st.sampled_from([0.0, 0.5, 1.0, 1.0])),
    }


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(engine=engines())
    def start(self, engine: dict[str, Any]) -> None:
        restless = RestlessController(engine["seed"]) if engine["seed"] % 2 else None
        self.harness = Harness(**engine, controller=restless)
        self.num_raised_at_random = 0

    @rule(several=st.lists(requests(), min_size=1, max_size=4))
    def add_some(self, several: list[dict[str, Any]]) -> None:
        self.add(several)

    def add(self, several: list[dict[str, Any]]) -> None:
        for request in several:
            fault = request.pop("fault")
            room = self.harness.scheduler.longest_context() - 1  # what the engine's door sees to
            prompt = request.pop("prompt")[:room]
            request["max_tokens"] = min(request["max_tokens"], room + 1 - len(prompt))
            drafter = NgramDrafter() if request.pop("ngrams", False) else None
            sequence = self.harness.add(prompt, drafter=drafter, **request)
            if fault is not None:
                self.harness.runner.faults[sequence.id] = FAULTS[fault]

    @precondition(lambda self: self.harness.sequences)
    @rule(data=st.data(), several=st.lists(requests(), min_size=1, max_size=3))
    def add_what_begins_like_another(self, data: st.DataObject, several: list[dict[str, Any]]) -> None:
        """The next turn of a conversation, a fork of it, the same again: what a prefix cache is for."""
        earlier = data.draw(st.sampled_from(self.harness.sequences))
        shared = earlier.tokens[: data.draw(st.integers(0, len(earlier.tokens)))]
        for request in several:
            request["prompt"] = shared + request["prompt"][: data.draw(st.sampled_from([1, 2, 20, 60]))]
            request["salt"] = data.draw(st.sampled_from(["", "", "", "other"]))
        self.add(several)

    @rule(really=st.sampled_from([False] * 5 + [True]))
    def clear_the_prefix_cache(self, really: bool) -> None:
        if really and self.harness.prefix is not None:
            self.harness.prefix.clear()

    @rule(num=st.integers(1, 12))
    def step(self, num: int) -> None:
        self.harness.steps(num)

    @rule(num=st.sampled_from([20, 40, 80]))
    def step_for_long(self, num: int) -> None:
        self.harness.steps(num)

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.harness.cancel(self._draw_live(data))
        self.harness.check()

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data())
    def cancel_while_a_step_runs(self, data: st.DataObject) -> None:
        sequence = self._draw_live(data)
        self.harness.step(meanwhile=lambda: self.harness.cancel(sequence))

    @precondition(lambda self: self.harness.live and not self._has_suspects())
    @rule()
    def step_raises(self) -> None:
        self.num_raised_at_random += 1
        self.harness.runner.raises_next = True
        self.harness.step()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run_to_idle(most=self._most_steps())
        LOADED.append(self.harness.runner.num_loaded)
        RESTORED.append(self.harness.runner.num_restored)
        faults = self.harness.runner.faults
        assert self.harness.runner.num_raised <= self.num_raised_at_random + 2 * len(faults)
        for sequence in self.harness.sequences:
            assert self.harness.answer(sequence).finish_reason != "error" or sequence.id in faults

    def _draw_live(self, data: st.DataObject) -> Any:
        return self.harness.live[data.draw(st.sampled_from(sorted(self.harness.live)))]

    def _has_suspects(self) -> bool:
        return any(sequence.failures for sequence in self.harness.live.values())

    def _most_steps(self) -> int:
        """The oldest decodes in every step and prefills in its turn; a failure makes all begin again.

        A row whose grammar wakes may feed up to two steps' tokens again, in turns with the others.
        """
        rows, live = self.harness.max_rows, self.harness.live.values()
        size = min(self.harness.prefill_step_size, MIN_CHUNK)
        chunks = [-(-(s.num_prompt + s.max_tokens) // size) for s in live]
        once = sum(rows * (num + 1) + s.max_tokens + 2 for num, s in zip(chunks, live, strict=True))
        again = 2 * (MAX_DEPTH + 1) * rows
        once += sum(again * s.max_tokens for s in live if s.drafting.grammar is not None)
        return once * (1 + 2 * len(self.harness.runner.faults) + self.num_raised_at_random)


SETTINGS = settings(
    max_examples=in_test_or_soak(60, 200),
    stateful_step_count=30,
    deadline=None,
    derandomize=not IN_SOAK,  # with so few examples, chance would decide whether the prefix cache is used
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@pytest.mark.soak
def test_every_history_gives_every_request_its_true_tokens() -> None:
    LOADED.clear()
    RESTORED.clear()
    run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)
    assert sum(LOADED) > in_test_or_soak(50, 200), "the prefix cache was hardly used"
    assert sum(RESTORED) > in_test_or_soak(5, 50), "hardly any row was rolled back"


@pytest.mark.soak
def test_long_histories_for_as_long_as_asked() -> None:
    seconds = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "0"))
    if not seconds:
        pytest.skip("set OUTRIDER_SOAK_SECONDS")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        longer = settings(SETTINGS, max_examples=50, stateful_step_count=100, database=None)
        run_state_machine_as_test(SchedulerMachine, settings=longer)
