"""What a drafter's own confidence is worth: the margins of the head, the matches of lookups."""

from __future__ import annotations

import random
from itertools import accumulate
from operator import mul

import pytest

from outrider.speculate.confidence import MARGINS, MATCHES, Classes, ConfidenceRecord


def test_chances_are_learnt_by_class() -> None:
    record, rng = ConfidenceRecord(MARGINS), random.Random(1)
    for _ in range(400):
        record.add([0.1], int(rng.random() < 0.2), is_sampled=False)
        record.add([5.0], int(rng.random() < 0.8), is_sampled=False)
    chances = record.chances(is_sampled=False)
    assert chances[0] == pytest.approx(0.2, abs=0.1)
    assert chances[len(MARGINS.limits) - 1] == pytest.approx(0.8, abs=0.1)
    assert record.chances(is_sampled=True) == pytest.approx(MARGINS.first_chances)


def test_only_drafts_up_to_the_first_wrong_one_count() -> None:
    record = ConfidenceRecord(MARGINS)
    for _ in range(200):
        record.add([9.0, 0.1, 9.0], 1, is_sampled=True)
    assert record.chances(is_sampled=True)[-1] > 0.98
    assert record.chances(is_sampled=True)[0] < 0.05


def test_a_chance_is_that_of_all_drafts_so_far() -> None:
    record = ConfidenceRecord(MARGINS)
    chances = record.chances(is_sampled=False)
    found = record.all_right([7.0, 0.3, 2.5], is_sampled=False)
    assert found == pytest.approx(list(accumulate((chances[8], chances[1], chances[5]), mul)))


def test_a_record_is_stored() -> None:
    record = ConfidenceRecord(MARGINS)
    for i in range(60):
        record.add([i / 10, 3.0], i % 3, is_sampled=bool(i % 2))
    again = ConfidenceRecord.from_json(record.as_json(), MARGINS)
    for is_sampled in (False, True):
        assert again.chances(is_sampled) == pytest.approx(record.chances(is_sampled), abs=0.01)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:1],
        lambda data: [data[0][:1], data[1][:1]],
        lambda data: [[[0.0], [0.0]], [[0.0], [0.0]]],
        lambda data: [data[0], [[5.0] * len(MARGINS.first_chances)] * 2],
        lambda data: "text",
        lambda data: None,
    ],
)
def test_a_damaged_record_is_refused(damage: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        ConfidenceRecord.from_json(damage(ConfidenceRecord(MARGINS).as_json()), MARGINS)  # type: ignore[operator]


def test_the_expected_yield_counts_the_drafts_that_are_fed() -> None:
    margins = ConfidenceRecord(MARGINS)
    all_fed = margins.expected_yield(0.0, 3, False)
    assert all_fed.fed == pytest.approx([1.0, 1.0, 1.0])
    assert all_fed.tokens[1] == pytest.approx(all_fed.tokens[0] * margins.mean_chance)
    for _ in range(200):
        margins.add([0.1], 0, False)  # a class whose drafts are wrong
        margins.add([9.0], 1, False)
    some = margins.expected_yield(0.6, 2, False)
    assert some.fed[0] == pytest.approx(0.5, abs=0.05)
    assert some.tokens[0] == pytest.approx(0.5, abs=0.05)
    assert some.tokens[1] < some.tokens[0]
    assert margins.expected_yield(1.1, 1, False).fed == [0.0]


@pytest.mark.parametrize("classes", [MARGINS, MATCHES])
def test_more_confidence_is_never_worth_less_at_first(classes: Classes) -> None:
    assert len(classes.first_chances) == len(classes.limits) + 1
    assert sorted(classes.first_chances) == list(classes.first_chances)
    assert sorted(classes.limits) == list(classes.limits)


def test_each_draft_of_a_lookup_matches_one_token_more() -> None:
    record = ConfidenceRecord(MATCHES)
    short, medium, long = record.chances(is_sampled=False)
    found = record.all_right([3, 4, 5], is_sampled=False)
    assert found == pytest.approx([short, short * medium, short * medium**2])
    assert record.all_right([10, 11], is_sampled=False) == pytest.approx([long, long**2])
