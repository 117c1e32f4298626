"""Drafts from the row's own text: always a continuation of what is there, and the right one in a loop."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from outrider.request import MAX_DEPTH
from outrider.speculate.ngram import MAX_INDEXED, MAX_MATCH, MIN_NGRAM, NGRAM_SIZES, NgramDrafter

texts = st.lists(st.integers(0, 3), min_size=1, max_size=80)  # few tokens, so that much repeats
lengths = st.integers(0, MAX_DEPTH)


def drafts_of(drafter: NgramDrafter, text: list[int], num: int) -> list[int]:
    proposal = drafter.propose(text, num)
    return [] if proposal is None else list(proposal.token_ids)


def longest_repeated_ending(text: list[int]) -> int:
    """How many of the last tokens also occur, followed by something, earlier in the text."""
    for size in NGRAM_SIZES:
        if any(text[end - size : end] == text[-size:] for end in range(size, len(text))):
            return size
    return 0


@given(texts, lengths)
@settings(max_examples=300, deadline=None)
def test_drafts_continue_an_earlier_occurrence_of_the_longest_ending(text: list[int], num: int) -> None:
    drafts = drafts_of(NgramDrafter(), text, num)
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
    assert drafts_of(NgramDrafter(), text, num)[0] == text[last]


@given(texts, st.lists(st.integers(1, 9), max_size=20), lengths)
@settings(max_examples=300, deadline=None)
def test_growing_index_equals_one_built_at_once(text: list[int], strides: list[int], num: int) -> None:
    growing = NgramDrafter()
    end = 1
    for stride in [*strides, len(text)]:
        known = text[:end]
        assert drafts_of(growing, known, num) == drafts_of(NgramDrafter(), known, num)
        end = min(len(text), end + stride)


def test_a_long_text_is_indexed_over_several_calls() -> None:
    text = [*range(3 * MAX_INDEXED), 10, 11, 2 * MAX_INDEXED + 10, 2 * MAX_INDEXED + 11]
    drafter = NgramDrafter()
    assert drafter.propose(text, 3) is None, "the second ending is not known yet"
    assert drafts_of(drafter, text[:-2], 3) == [12, 13, 14]
    assert drafts_of(drafter, text, 3) == [2 * MAX_INDEXED + 12 + i for i in range(3)]


@given(texts, st.integers(-3, 12), lengths)
@settings(deadline=None)
def test_never_more_than_asked_for_or_allowed(text: list[int], num: int, max_drafts: int) -> None:
    drafts = drafts_of(NgramDrafter(max_drafts), text, num)
    assert len(drafts) <= max(0, min(num, max_drafts))
    assert drafts == drafts_of(NgramDrafter(), text, num)[:max_drafts]


@given(texts, lengths)
@settings(deadline=None)
def test_asking_twice_gives_the_same_and_leaves_the_text_alone(text: list[int], num: int) -> None:
    drafter, copy = NgramDrafter(), list(text)
    assert drafts_of(drafter, text, num) == drafts_of(drafter, text, num)
    assert text == copy


@given(period=st.integers(1, 20), more=st.integers(0, 30), num=lengths, start=st.integers(0, 1000))
@settings(deadline=None)
def test_periodic_text_is_predicted_perfectly(period: int, more: int, num: int, start: int) -> None:
    length = period + MIN_NGRAM + more
    endless = [start + i % period for i in range(length + num)]
    assert drafts_of(NgramDrafter(), endless[:length], num) == endless[length:]


@pytest.mark.parametrize("text", [[1], [1, 2], [1, 2, 3, 4, 5], [1, 2, 1]])
def test_text_without_a_repeated_ending_gives_no_drafts(text: list[int]) -> None:
    assert drafts_of(NgramDrafter(), text, 4) == []


def test_longer_match_is_preferred_to_a_later_one() -> None:
    text = [1, 2, 3, 9, 0, 2, 3, 8, 0, 1, 2, 3]
    assert drafts_of(NgramDrafter(), text, 1) == [9]
    assert drafts_of(NgramDrafter(), text[3:], 1) == [8]


@given(texts, lengths)
@settings(max_examples=300, deadline=None)
def test_a_draft_is_as_sure_as_its_match_is_long(text: list[int], num: int) -> None:
    proposal = NgramDrafter().propose(text, num)
    if proposal is None:
        return
    size = longest_repeated_ending(text)
    places = (end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == text[-size:])
    start = next(places)
    match = max(n for n in range(size, min(start, MAX_MATCH) + 1) if text[start - n : start] == text[-n:])
    assert list(proposal.confidence) == [match + i for i in range(num)]
