"""Lazy grammars in random histories: drafts, neighbours, preemptions and overlapped steps change no token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.cache.recurrent import RecurrentState
from outrider.engine.scheduler import Scheduler
from outrider.engine.sequence import Sequence as EngineSequence
from outrider.grammar.lazy import LazyRowGrammar
from outrider.grammar.triggers import CompiledTriggers
from outrider.request import SamplingParams
from patience import in_test_or_soak
from step.histories import Ask, Divergence, History, Kind, Tally, play, random_history, world
from step.row_bans import without_bans
from step.row_grammars import VOWELS, with_lazy_grammar

NUM_HISTORIES = {
    "llama": in_test_or_soak(6, 300),
    "gemma3_text": in_test_or_soak(2, 60),
    "qwen3_5": in_test_or_soak(2, 60),
}
FIRST_SEED = 90_002  # grammars wake and sleep, and rows are rolled back, in the first histories


def lazy_history(seed: int, vocab_size: int) -> History:
    """Half of the requests have a lazy grammar; or all have one, and nothing else that needs the host."""
    history = random_history(seed, vocab_size)
    rng = random.Random(f"lazy {seed}")
    if rng.random() < 0.5:
        asks = [_lazy(rng, ask) if rng.random() < 0.5 else ask for ask in history.asks]
        return replace(history, asks=tuple(asks))
    kind: Kind = "plain" if history.head == "none" else "head"
    params = SamplingParams(
        temperature=rng.choice((0.0, 1.0)), grammar=VOWELS, max_tokens=rng.randint(20, 60)
    )
    asks = [
        replace(
            ask,
            kind=kind,
            joins_at=0,
            params=replace(params, seed=ask.params.seed, draft_depth=rng.choice((0, 1, 3, 8))),
        )
        for ask in history.asks
    ]
    return replace(history, asks=tuple(asks))


def _lazy(rng: random.Random, ask: Ask) -> Ask:
    return replace(ask, params=with_lazy_grammar(rng, replace(without_bans(ask.params), grammar=None)))


def play_many(family: str, num: int) -> Tally:
    tally = Tally()
    for seed in range(FIRST_SEED, FIRST_SEED + num):
        try:
            tally.add(play(world(family), lazy_history(seed, world(family).vocab_size)))
        except Exception as error:
            error.add_note(f"{family}, seed {seed}")
            raise
    return tally


@pytest.mark.soak
@pytest.mark.parametrize("family", NUM_HISTORIES)
def test_every_request_gives_what_it_gives_alone_without_drafts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    roll_back, commit = Scheduler._roll_back, LazyRowGrammar.commit

    def counting_roll_back(self: Scheduler, sequence: EngineSequence, *numbers: int) -> None:
        counted["rolled back"] += 1
        roll_back(self, sequence, *numbers)

    def counting_commit(self: LazyRowGrammar, token_id: int) -> None:
        before = self._awake
        commit(self, token_id)
        counted["woken"] += before is None and self._awake is not None
        counted["asleep again"] += before is not None and self._awake is None
        assert not self._is_given_up

    monkeypatch.setattr(Scheduler, "_roll_back", counting_roll_back)
    monkeypatch.setattr(LazyRowGrammar, "commit", counting_commit)
    tally = play_many(family, NUM_HISTORIES[family])
    print(tally.summary(), dict(counted))
    assert tally.excused <= world(family).tolerance.excused * tally.tokens
    assert counted["woken"] > 10
    assert counted["asleep again"] > 5
    assert counted["rolled back"] > 0
    assert tally.ahead > 0


# -- controls: what the test above must notice -----------------------------------------------------------


def keeps_tokens_without_masks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LazyRowGrammar, "is_restricting", False)


def feeds_drafts_that_wake_it(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: LazyRowGrammar, drafts: Sequence[int]) -> list[Any]:
        return [self._state] * (len(drafts) + 1)

    patch.setattr(LazyRowGrammar, "_states", wrong)


def lets_any_token_go_on_after_a_marker(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: CompiledTriggers, state: Any) -> np.ndarray | None:
        return None

    patch.setattr(CompiledTriggers, "mask", wrong)


def forgets_to_restore_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecurrentState, "restore", lambda self, slot, version: None)


def keeps_no_version_of_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecurrentState, "version", lambda self: self.parts)  # the arrays that a pass changes


@pytest.mark.parametrize(
    ("break_it", "family"),
    [
        (keeps_tokens_without_masks, "llama"),
        (feeds_drafts_that_wake_it, "llama"),
        (lets_any_token_go_on_after_a_marker, "llama"),
        (forgets_to_restore_states, "qwen3_5"),
        (keeps_no_version_of_states, "qwen3_5"),
    ],
)
def test_each_way_to_be_wrong_is_noticed(break_it: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with pytest.raises((Divergence, AssertionError)):
        play_many(family, NUM_HISTORIES[family])
