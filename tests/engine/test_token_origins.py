"""How each token was won: what a request is told agrees with what the engine fed and accepted."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import Any

import pytest
from fake_runner import true_next
from scheduler_harness import Harness

from outrider.engine.draft_state import DraftState, Proposal
from outrider.engine.sequence import Delta, Sequence, TokenOrigin, token_origins
from outrider.request import SamplingParams
from outrider.speculate.acceptance import Source
from plan_rows import plan_row


class Recording(Harness):
    """Keeps all deltas of each request."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.deltas: dict[str, list[Delta]] = {}

    def take(self, *deltas: Delta) -> None:
        for delta in deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        super().take(*deltas)

    def ask(self, *args: Any, **kwargs: Any) -> Sequence:
        sequence = self.add(*args, **kwargs)
        params = replace(sequence.params, token_origins=True)
        sequence.request = replace(sequence.request, params=params)
        return sequence

    def whole(self, sequence: Sequence) -> Delta:
        first, *others = self.deltas[sequence.request.id]
        for delta in others:
            first = first.merged(delta)
        return first


class Oracle:
    """Drafts two right tokens and a wrong one."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def propose(self, token_ids: Tokens[int], num: int) -> Proposal:
        known = list(token_ids)
        for _ in range(2):
            known.append(true_next(known))
        known.append((true_next(known) + 1) % 16)
        return Proposal(self.source, known[len(token_ids) :][:num])


def check(whole: Delta, source: str) -> None:
    """As many drafts as were accepted, each step's in order, then one token of the model."""
    assert whole.stats is not None
    assert len(whole.origins) == len(whole.token_ids)
    drafts = [origin for origin in whole.origins if origin.place is not None]
    assert len(drafts) == sum(whole.stats.accepted) > 0
    assert {draft.name for draft in drafts} == {source}
    place = 0
    for origin in whole.origins:
        if origin.place is None:
            assert origin.name == ("bonus" if place else "plain")
            place = 0
        else:
            place += 1
            assert origin.place == place


@pytest.mark.parametrize("ahead", [0.0, 1.0])
def test_drafts_of_the_head(ahead: float) -> None:
    harness = Recording(ahead=ahead)
    asked = [harness.ask(5 + i, max_tokens=40, depth=1 + i) for i in range(3)]
    plain, silent = harness.ask(6, max_tokens=10), harness.add(6, max_tokens=20, depth=2)
    harness.run_to_idle()
    assert (harness.num_ahead > 0) == (ahead > 0)
    for sequence in asked:
        check(harness.whole(sequence), "head")
    assert set(harness.whole(plain).origins) == {TokenOrigin("plain")}
    assert harness.whole(silent).origins == ()


@pytest.mark.parametrize("source", ["ngram", "prediction"])
def test_drafts_of_a_drafter(source: Source) -> None:
    harness = Recording()
    asked = harness.ask(6, max_tokens=20, depth=4, drafter=Oracle(source))
    harness.run_to_idle()
    check(harness.whole(asked), source)


def test_an_answer_that_ends_among_its_drafts_tells_only_of_its_own_tokens() -> None:
    harness = Recording()
    first = harness.add(6, max_tokens=20)
    harness.run_to_idle()
    stop = harness.answer(first).token_ids[4]
    options = {"max_tokens": 20, "depth": 4, "stop_ids": [stop], "drafter": Oracle("ngram")}
    asked = harness.ask(first.request.prompt_ids, **options)
    harness.run_to_idle()
    whole = harness.whole(asked)
    assert whole.finish_reason == "stop"
    assert len(whole.origins) == len(whole.token_ids) < 20


def test_drafts_that_a_grammar_forces() -> None:
    row = plan_row([1, 2], [3], [4, 5, 6], params=SamplingParams())
    row = replace(row, draft_source="head", num_forced=2)
    forced = [TokenOrigin("forced", 1), TokenOrigin("forced", 2)]
    assert token_origins(row, 4) == (*forced, TokenOrigin("head", 3), TokenOrigin("bonus"))
    assert token_origins(row, 2) == (forced[0], TokenOrigin("bonus"))
    assert token_origins(row, 1) == (TokenOrigin("plain"),)


def test_the_source_is_that_of_the_proposal_in_use() -> None:
    drafting = DraftState(max_depth=4, head_depth=4)
    drafting.proposals = [Proposal("ngram", [1, 2]), Proposal("head", [3, 4, 5], num_sure=1)]
    drafting.use(1, 3)
    assert (drafting.drafts, drafting.source, drafting.num_forced) == ([3, 4, 5], "head", 1)
    drafting.use(0, 2)
    assert (drafting.drafts, drafting.source, drafting.num_forced) == ([1, 2], "ngram", 0)
