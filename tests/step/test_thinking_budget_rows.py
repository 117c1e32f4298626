"""Thinking budgets in a batch: every request gives what plain decoding with the same rule gives."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.engine.thinking_budget import Place, ThinkingBudget
from patience import in_test_or_soak
from step.histories import Divergence, History, Tally, play, random_history, world
from step.row_thinking import with_random_thinking

NUM_HISTORIES = in_test_or_soak(20, 150)
FIRST_SEED = 20_000
NOTICED_BY = {"tokens_without_masks_count": 20_019}  # the history that notices a fault, if not the first two


def with_budgets(history: History, vocab_size: int) -> History:
    """The same history in which nearly all requests have a budget."""
    rng = random.Random(f"thinking {history.seed}")
    asks = [
        replace(ask, params=with_random_thinking(rng, ask.params, vocab_size)) if rng.random() < 0.9 else ask
        for ask in history.asks
    ]
    return replace(history, asks=tuple(asks))


def play_many(family: str, num: int, first_seed: int = FIRST_SEED) -> Tally:
    tally, tiny = Tally(), world(family)
    for seed in range(first_seed, first_seed + num):
        tally.add(play(tiny, with_budgets(random_history(seed, tiny.vocab_size), tiny.vocab_size)))
    return tally


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_an_answer_with_a_thinking_budget_does_not_depend_on_drafts(family: str) -> None:
    tally = play_many(family, NUM_HISTORIES if family == "llama" else NUM_HISTORIES // 4)
    print(tally.summary())
    assert tally.excused <= world(family).tolerance.excused * tally.tokens
    if family == "llama":
        assert tally.thought.keys() >= {"free", "closed, from the prompt", "closed, opened by the model"}
        assert tally.preemptions > 0
        assert tally.failed_steps > 0
        assert tally.held.total() > 0
        assert tally.ahead > 0


def forces_only_committed_positions(patch: pytest.MonkeyPatch) -> None:
    masks = ThinkingBudget.masks

    def wrong(self: ThinkingBudget, drafts: list[int]) -> np.ndarray | None:
        first = masks(self, ())
        if first is None or not len(drafts):
            return first
        return np.concatenate([first, np.full((len(drafts), first.shape[1]), 0xFFFFFFFF, np.uint32)])

    patch.setattr(ThinkingBudget, "masks", wrong)
    patch.setattr(ThinkingBudget, "num_allowed", lambda self, drafts: len(drafts))


def tokens_without_masks_count(patch: pytest.MonkeyPatch) -> None:
    """A step that was launched before the budget was used up has no masks: see Sequence.commit."""
    patch.setattr(ThinkingBudget, "is_restricting", False)


def counts_drafts_twice(patch: pytest.MonkeyPatch) -> None:
    places = ThinkingBudget._places

    def wrong(self: ThinkingBudget, drafts: list[int]) -> list[Place]:
        found = places(self, drafts)
        return [self._place, *found[2:], found[-1]] if len(found) > 1 else found

    patch.setattr(ThinkingBudget, "_places", wrong)


FAULTS = [forces_only_committed_positions, tokens_without_masks_count, counts_drafts_twice]


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_fault_is_noticed(fault, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    fault(monkeypatch)
    with pytest.raises((Divergence, AssertionError)):
        play_many("llama", 40, NOTICED_BY.get(fault.__name__, FIRST_SEED))
