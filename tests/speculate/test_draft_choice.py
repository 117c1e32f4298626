"""Which drafts are fed: against a search of all possibilities."""

from __future__ import annotations

import random
from itertools import accumulate, product
from operator import mul

import pytest

from outrider.speculate.draft_choice import RowOffers, StepCost, choose_drafts


def _cost(token_s: float, padding_share: float, num_rows: int) -> StepCost:
    """A step of 10 seconds, and more for every token and for padding."""

    def cost(num_tokens: int, width: int) -> float:
        return 10 + token_s * (num_tokens + padding_share * (num_rows * width - num_tokens))

    return cost


def _gain(rows: list[RowOffers], fed: list[tuple[int, int]], cost: StepCost, token_s: float) -> float:
    chances = sum(sum(row.offers[which][:num]) for row, (which, num) in zip(rows, fed, strict=True) if num)
    num_tokens, width = len(rows) + sum(num for _, num in fed), 1 + max(num for _, num in fed)
    return token_s * chances - cost(num_tokens, width)


def _chances(rng: random.Random, num: int) -> list[float]:
    return list(accumulate((rng.random() ** 0.3 for _ in range(num)), mul))


@pytest.mark.parametrize("padding_share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_is_better(seed: int, padding_share: float) -> None:
    rng = random.Random(seed)
    rows = [RowOffers([_chances(rng, rng.randint(1, 4))] if rng.random() < 0.9 else ()) for _ in range(4)]
    feed_s = rng.choice((0.1, 1.0, 3.0))
    cost = _cost(feed_s, padding_share, len(rows))
    token_s = cost(len(rows), 1) / len(rows)
    fed = choose_drafts(rows, cost, token_s, min_chance=(1 - padding_share) * feed_s / token_s)
    possible = product(*(range(len(row.offers[0]) + 1) if row.offers else (0,) for row in rows))
    best = max(_gain(rows, [(0, num) for num in nums], cost, token_s) for nums in possible)
    assert _gain(rows, fed, cost, token_s) == pytest.approx(best)


def test_only_one_cost_is_looked_up_for_each_number_of_drafts_of_a_row_alone() -> None:
    asked = []

    def cost(num_tokens: float, width: int) -> float:
        asked.append((num_tokens, width))
        return 10 + 0.1 * num_tokens

    assert choose_drafts([RowOffers([[0.9] * 8])], cost, token_s=5.0, min_chance=0.1) == [(0, 8)]
    assert asked == [(1, 1), *((1 + num, 1 + num) for num in range(1, 9))]


def test_each_row_has_its_own_depth() -> None:
    rows = [RowOffers([[0.9, 0.9, 0.8, 0.1]]), RowOffers([[0.3, 0.2]]), RowOffers([[0.9, 0.2]]), RowOffers()]
    fed = choose_drafts(rows, _cost(1.5, 0.0, 4), token_s=3.0, min_chance=0.5)
    assert fed == [(0, 3), (0, 0), (0, 1), (0, 0)]


def test_where_padding_costs_as_much_as_tokens_all_rows_use_the_width() -> None:
    rows = [RowOffers([[0.9, 0.9]]), RowOffers([[0.3, 0.2]]), RowOffers([[0.6, 0.5]])]
    fed = choose_drafts(rows, _cost(0.5, 1.0, 3), token_s=3.0, min_chance=0.0)
    assert [num for _, num in fed] == [2, 2, 2]


def test_rows_of_fixed_depth_feed_what_they_have() -> None:
    rows = [RowOffers([[0.1, 0.1, 0.1]], fixed_depth=2), RowOffers([[0.2]]), RowOffers((), fixed_depth=3)]
    fed = choose_drafts(rows, _cost(2.0, 0.0, 3), token_s=3.0, min_chance=0.66)
    assert fed == [(0, 2), (0, 0), (0, 0)]


def test_the_offer_that_brings_more_is_fed() -> None:
    short, long = [0.9], [0.8, 0.8, 0.8, 0.8]
    rows = [RowOffers([short, long]), RowOffers([long, short])]
    fed = choose_drafts(rows, _cost(1.0, 0.0, 2), token_s=5.0, min_chance=0.2)
    assert fed == [(1, 4), (0, 4)]
    unlikely = [0.25, 0.24, 0.23, 0.22]
    fed = choose_drafts([RowOffers([short, unlikely])], _cost(1.0, 0.0, 1), token_s=5.0, min_chance=0.2)
    assert fed == [(0, 1)]


def test_there_may_be_no_rows_and_no_drafts() -> None:
    assert choose_drafts([], _cost(1.0, 1.0, 1), token_s=5.0, min_chance=0.2) == []
    assert choose_drafts([RowOffers()], _cost(1.0, 1.0, 1), token_s=5.0, min_chance=0.2) == [(0, 0)]


@pytest.mark.parametrize(("worth", "fed"), [(1.0, (0, 2)), (0.5, (1, 1))])
def test_an_offer_whose_tokens_are_worth_less_has_to_be_surer(worth: float, fed: tuple[int, int]) -> None:
    rows = [RowOffers([[0.9, 0.8], [0.6, 0.1]], worths=(worth, 1.0))]
    assert choose_drafts(rows, _cost(1.0, 0.0, 1), token_s=2.0, min_chance=0.5) == [fed]
    alone = [RowOffers(rows[0].offers[:1], worths=(worth,))]
    assert choose_drafts(alone, _cost(1.0, 0.0, 1), token_s=2.0, min_chance=0.5) == [
        (0, 2 if worth == 1 else 0)
    ]
