"""Percentiles and spreads."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.bench.statistics import Spread, percentile, weighted_percentile

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


def test_spread_is_median_least_and_most() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    assert Spread.of([]) is None
    assert Spread(1.234, 1.0, 2.0).text(2) == "1.23 (1.00-2.00)"


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.75, 3), (0.95, 4), (1.0, 4)])
def test_percentile_is_the_least_value_that_the_share_does_not_exceed(share: float, value: float) -> None:
    assert percentile([4.0, 2.0, 1.0, 3.0], share) == value


def test_no_values_have_no_percentile() -> None:
    assert percentile([], 0.5) is None
    assert weighted_percentile([(1.0, 0.0)], 0.5) is None


@given(VALUES, st.floats(0, 1))
def test_whole_weights_count_like_repetitions(values: list[float], share: float) -> None:
    weights = [1 + i % 3 for i in range(len(values))]
    repeated = [value for value, weight in zip(values, weights, strict=True) for _ in range(weight)]
    pairs = [(value, float(weight)) for value, weight in zip(values, weights, strict=True)]
    assert weighted_percentile(pairs, share) == percentile(repeated, share)


@given(VALUES)
def test_half_lies_at_the_low_median(values: list[float]) -> None:
    assert percentile(values, 0.5) == statistics.median_low(values)
