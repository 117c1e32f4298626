"""Drafts from a predicted text: followed, lost, found again, and cheap while lost."""

from __future__ import annotations

import time

from outrider.speculate.prediction import PredictionDrafter

PROMPT = [9, 9, 9]


def drafts(drafter: PredictionDrafter, tokens: list[int], num: int) -> list[int]:
    proposal = drafter.propose(tokens, num)
    return [] if proposal is None else list(proposal.token_ids)


def proposals(prediction: list[int], answer: list[int], num: int = 4) -> list[list[int]]:
    """What is proposed after the prompt and after each token of the answer."""
    drafter = PredictionDrafter(prediction, len(PROMPT))
    return [drafts(drafter, PROMPT + answer[:i], num) for i in range(len(answer) + 1)]


def test_follows_the_prediction_from_its_start_to_its_end() -> None:
    assert proposals([1, 2, 3], [1, 2, 3]) == [[1, 2, 3], [2, 3], [3], []]


def test_finds_its_place_again_after_an_edit() -> None:
    found = proposals([1, 2, 3, 4, 5, 6], [1, 7, 7, 3, 4])
    assert found == [[1, 2, 3, 4], [2, 3, 4, 5], [], [], [], [5, 6]]


def test_tokens_that_it_was_not_asked_about_are_caught_up_with() -> None:
    drafter = PredictionDrafter([1, 2, 3, 4, 5], len(PROMPT))
    assert drafts(drafter, [*PROMPT, 1, 2, 3], 8) == [4, 5]


def test_longest_ending_and_its_last_occurrence_win() -> None:
    prediction = [1, 2, 5, 6, 2, 5, 7, 1, 2, 5, 8]
    assert proposals(prediction, [4, 6, 2, 5])[-1] == [7, 1, 2, 5]
    assert proposals(prediction, [4, 4, 2, 5])[-1] == [8]


def test_prompt_is_no_part_of_the_answer() -> None:
    drafter = PredictionDrafter([9, 1, 2], len(PROMPT))
    assert drafts(drafter, [*PROMPT, 1], 4) == []


def test_empty_prediction_proposes_nothing() -> None:
    assert proposals([], [1, 2, 3]) == [[], [], [], []]


def test_lost_row_does_not_search_a_long_prediction_at_every_step() -> None:
    drafter = PredictionDrafter(list(range(60_000)), 1)
    tokens = [0, *([70_000] * 200)]
    drafter.propose(tokens, 8)
    started_s = time.thread_time()
    for _ in range(200):
        tokens.append(70_000)
        assert drafts(drafter, tokens, 8) == []
    assert time.thread_time() - started_s < 1  # the search took 5 s
