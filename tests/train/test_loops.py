from __future__ import annotations

import pytest

from outrider.train.loops import MIN_REPEATED, cut_loop

TEXT = tuple(range(100, 140))


@pytest.mark.parametrize("period", [1, 3, 17, 64])
def test_an_endless_loop_is_cut_after_two_periods(period: int) -> None:
    loop = tuple(range(period))
    for rest in (0, period // 2):
        assert cut_loop(TEXT + loop * 60 + loop[:rest]) == TEXT + loop * 2


@pytest.mark.parametrize(
    "token_ids",
    [(), (1,), (1, 1, 1), TEXT, TEXT + (1, 2) * 5, (1, 2, 3) * 30 + TEXT, TEXT + TEXT, tuple(range(65)) * 4],
    ids=["empty", "one", "three", "text", "short", "loop that was left", "twice", "long period"],
)
def test_ordinary_text_stays(token_ids: tuple[int, ...]) -> None:
    assert cut_loop(token_ids) == token_ids


def test_a_repetition_counts_from_its_least_length_on() -> None:
    assert len(cut_loop((9,) * MIN_REPEATED)) == MIN_REPEATED
    assert len(cut_loop((9,) * (MIN_REPEATED + 1))) == 2
