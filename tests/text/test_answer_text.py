"""An answer's text: stop strings do not end it before min_tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.text.detokenizer import AnswerText


def answer(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """Text, stop string and number of tokens of an answer whose i-th token is written `pieces[i]`."""
    text = AnswerText(lambda ids: "".join(pieces[i] for i in ids), (), stops, min_tokens)
    shown = ""
    for num, token_id in enumerate(range(len(pieces)), start=1):
        piece, matched = text.push(token_id)
        shown += piece
        if matched is not None:
            return shown, matched, num
    return shown + text.flush(), None, len(pieces)


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [
        (0, ("a", ".", 2)),
        (1, ("a", ".", 2)),
        (2, ("a.b", ".", 4)),  # the second token is within the first two
        (3, ("a.b", ".", 4)),
        (4, ("a.b.c", None, 5)),
        (9, ("a.b.c", None, 5)),
    ],
)
def test_stop_string_within_the_first_min_tokens_is_text(
    min_tokens: int, expected: tuple[str, str | None, int]
) -> None:
    assert answer(["a", ".", "b", ".", "c"], ["."], min_tokens) == expected


def test_stop_string_may_begin_within_the_first_min_tokens() -> None:
    assert answer(["x<", "/", "s>", "y"], ["</s>"], 2) == ("x", "</s>", 3)


def test_stop_string_that_was_passed_does_not_hide_one_that_overlaps_it() -> None:
    assert answer(["aa", "a", "b"], ["aa"], 1) == ("a", "aa", 2)


def test_nothing_is_lost_when_the_answer_ends_on_a_passed_stop_string() -> None:
    assert answer(["x", "END"], ["END"], 2) == ("xEND", None, 2)


@given(
    pieces=st.lists(st.text(alphabet="ab", min_size=1, max_size=3), min_size=1, max_size=10),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    min_tokens=st.integers(0, 11),
)
def test_first_stop_string_that_ends_after_min_tokens_counts(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    whole, free = "".join(pieces), len("".join(pieces[:min_tokens]))
    ends = (end for end in range(free + 1, len(whole) + 1) if any(whole[:end].endswith(s) for s in stops))
    end = next(ends, None)
    text, matched, _ = answer(pieces, stops, min_tokens)
    if end is None:
        assert (text, matched) == (whole, None)
    else:
        longest = max((s for s in stops if whole[:end].endswith(s)), key=len)
        assert (text, matched) == (whole[: end - len(longest)], longest)
