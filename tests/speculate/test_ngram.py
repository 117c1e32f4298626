"""Drafts from the row's own text: always a continuation of what is there, and the right one in a loop."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from outrider.request import MAX_DEPTH
from outrider.speculate.ngram import MAX_INDEXED, MIN_NGRAM, NGRAM_SIZES, NgramDrafter

texts = st.lists(st.integers(0, 3), min_size=1, max_size=80)  # few tokens, so that much repeats
lengths = st.integers(0, MAX_DEPTH)


def longest_repeated_ending(text: list[int]) -> int:
    """How many of the last tokens also occur, followed by something, earlier in the text."""
    for size in NGRAM_SIZES:
        if any(text[end - size : end] == text[-size:] for end in range(size, len(text))):
            return size
    return 0


@given(texts, lengths)
@settings(max_examples=300, deadline=None)
def test_drafts_continue_an_earlier_occurrence_of_the_longest_ending(text: list[int], num: int) -> None:
    drafts = list(NgramDrafter().propose(text, num))
    size = longest_repeated_ending(text)
    assert len(drafts) == (num if size else 0)
    whole = text + drafts
    places = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
    assert not drafts or any(whole[end : end + num] == drafts for end in places)


@given(texts, lengths)
@settings(max_examples=300, deadline=None)
def test_the_last_occurrence_counts(text: list[int], num: int) -> None:
    size = longest_repeated_ending(text)
    if not size or not num:
        return
    last = max(end for end in range(size, len(text)) if text[end - size : end] == text[-size:])
    assert NgramDrafter().propose(text, num)[0] == text[last]


@given(texts, st.lists(st.integers(1, 9), max_size=20), lengths)
@settings(max_examples=300, deadline=None)
def test_growing_index_equals_one_built_at_once(text: list[int], strides: list[int], num: int) -> None:
    growing = NgramDrafter()
    end = 1
    for stride in [*strides, len(text)]:
        known = text[:end]
        assert list(growing.propose(known, num)) == list(NgramDrafter().propose(known, num))
        end = min(len(text), end + stride)


def test_a_long_text_is_indexed_over_several_calls() -> None:
    text = [*range(3 * MAX_INDEXED), 10, 11, 2 * MAX_INDEXED + 10, 2 * MAX_INDEXED + 11]
    drafter = NgramDrafter()
    assert drafter.propose(text, 3) == (), "the second ending is not known yet"
    assert drafter.propose(text[:-2], 3) == [12, 13, 14]
    assert drafter.propose(text, 3) == [2 * MAX_INDEXED + 12 + i for i in range(3)]


@given(texts, st.integers(-3, 12), lengths)
@settings(deadline=None)
def test_never_more_than_asked_for_or_allowed(text: list[int], num: int, max_drafts: int) -> None:
    drafts = list(NgramDrafter(max_drafts).propose(text, num))
    assert len(drafts) <= max(0, min(num, max_drafts))
    assert drafts == list(NgramDrafter().propose(text, num))[:max_drafts]


@given(texts, lengths)
@settings(deadline=None)
def test_asking_twice_gives_the_same_and_leaves_the_text_alone(text: list[int], num: int) -> None:
    drafter, copy = NgramDrafter(), list(text)
    assert list(drafter.propose(text, num)) == list(drafter.propose(text, num))
    assert text == copy


@given(period=st.integers(1, 20), more=st.integers(0, 30), num=lengths, start=st.integers(0, 1000))
@settings(deadline=None)
def test_periodic_text_is_predicted_perfectly(period: int, more: int, num: int, start: int) -> None:
    length = period + MIN_NGRAM + more
    endless = [start + i % period for i in range(length + num)]
    assert list(NgramDrafter().propose(endless[:length], num)) == endless[length:]


@pytest.mark.parametrize("text", [[1], [1, 2], [1, 2, 3, 4, 5], [1, 2, 1]])
def test_text_without_a_repeated_ending_gives_no_drafts(text: list[int]) -> None:
    assert list(NgramDrafter().propose(text, 4)) == []


def test_longer_match_is_preferred_to_a_later_one() -> None:
    text = [1, 2, 3, 9, 0, 2, 3, 8, 0, 1, 2, 3]
    assert list(NgramDrafter().propose(text, 1)) == [9]
    assert list(NgramDrafter().propose(text[3:], 1)) == [8]
