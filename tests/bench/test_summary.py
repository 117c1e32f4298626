"""Figures from rounds whose every number is known."""

from __future__ import annotations

import pytest
from made_up import a_round, answer, result

from outrider.bench.answer import DraftCounts
from outrider.bench.statistics import Spread
from outrider.bench.summary import figures, ratios, same_texts, stalls, token_gaps, ttft_ratios


def test_tokens_that_come_together_share_the_time_since_those_before() -> None:
    one = answer((1.0, 2), (1.4, 4), (1.5, 1))
    assert token_gaps([one]) == [(pytest.approx(0.1), 4), (pytest.approx(0.1), 1)]
    assert stalls([one]) == [pytest.approx(0.4), pytest.approx(0.1)]


def test_an_answer_of_one_arrival_has_no_gaps() -> None:
    assert token_gaps([answer((1.0, 5))]) == []


def test_a_long_stride_weighs_as_many_tokens_as_it_brought() -> None:
    """Nine tokens within 0.9 s and one after 1 s: the median token took 0.1 s."""
    found = figures(
        result(a_round("off", 0, 1.0, answers=(answer((0.0, 1), (0.9, 9), (1.9, 1)),))), "off", []
    )
    assert found is not None
    assert found.inter_token.p50_s == pytest.approx(0.1)
    assert found.inter_token.p95_s == pytest.approx(1.0)


def test_ratios_are_taken_round_by_round() -> None:
    """A machine that slows down by half hits both variants: the ratio does not move."""
    found = result(
        a_round("off", 0, 10), a_round("auto", 0, 15), a_round("auto", 1, 7.5), a_round("off", 1, 5)
    )
    assert ratios(found, "auto", "off") == [pytest.approx(1.5), pytest.approx(1.5)]


def test_a_round_that_the_other_variant_has_not_finished_is_left_out() -> None:
    found = result(a_round("off", 0, 10), a_round("auto", 0, 20), a_round("auto", 1, 30))
    assert ratios(found, "auto", "off") == [pytest.approx(2.0)]
    assert ratios(found, "auto", "elsewhere") == []


def test_ratios_of_the_time_to_first_token_are_taken_round_by_round() -> None:
    """The mean of a round's answers; an answer that failed has no time."""
    bad = answer(error="no", finish_reason=None)
    found = result(
        a_round("off", 0, 10, answers=(answer((1.0, 1)), answer((3.0, 1)), bad)),
        a_round("auto", 0, 10, answers=(answer((1.0, 1)),)),
        a_round("auto", 1, 10, answers=(answer((6.0, 1)),)),
        a_round("off", 1, 10, answers=(answer((4.0, 1)),)),
        a_round("off", 2, 10, answers=(bad,)),
        a_round("auto", 2, 10),
    )
    assert ttft_ratios(found, "auto", "off") == [0.5, 1.5]
    auto = figures(found, "auto", ["off"])
    assert auto is not None
    assert auto.ttft_ratios == {"off": Spread(1.0, 0.5, 1.5)}


def test_figures_of_a_variant() -> None:
    drafts = DraftCounts(10, 15, (8, 2), (4, 1))
    found = figures(
        result(
            a_round("off", 0, 10),
            a_round("auto", 0, 20, drafts=drafts, peak_bytes=5),
            a_round("auto", 1, 10, drafts=drafts, peak_bytes=7),
            a_round("off", 1, 10),
        ),
        "auto",
        ["off"],
    )
    assert found is not None
    assert found.tokens_per_s == Spread(15, 10, 20)
    assert found.ratios == {"off": Spread(1.5, 1.0, 2.0)}
    assert (found.stride, found.acceptance, found.peak_bytes) == (1.5, [0.5, 0.5], 7)
    assert (found.ttft.p50_s, found.ttft.p95_s) == (0.25, 0.5)
    assert (found.num_rounds, found.num_answers, found.num_stopped, found.num_tokens) == (2, 2, 2, 20)


def test_failed_answers_are_counted_and_not_timed() -> None:
    bad = answer(error="no", finish_reason=None)
    found = figures(result(a_round("off", 0, 10, answers=(answer((1.0, 5), (2.0, 5)), bad, bad))), "off", [])
    assert found is not None
    assert (found.num_failed, found.errors, found.num_tokens) == (2, {"no": 2}, 10)
    assert found.ttft.p95_s == 1.0


def test_a_variant_without_any_answer_has_no_speed() -> None:
    bad = answer(error="no", finish_reason=None)
    found = figures(result(a_round("off", 0, 10, answers=(bad,))), "off", ["off"])
    assert found is not None
    assert (found.tokens_per_s, found.stride, found.acceptance, found.ratios) == (
        None,
        None,
        None,
        {"off": None},
    )


def test_a_variant_without_a_round_has_no_figures() -> None:
    assert figures(result(a_round("off", 0, 10)), "auto", ["off"]) is None


def test_json_is_checked_where_it_was_asked_for_and_the_model_ended_it() -> None:
    answers = (
        answer((1.0, 1), kind="constrained", text='{"a": 1}'),
        answer((1.0, 1), kind="constrained", text="Sure! {}"),
        answer((1.0, 1), kind="constrained", text='{"a', finish_reason="length"),
        answer((1.0, 1), text="hello"),
    )
    found = figures(result(a_round("off", 0, 10, answers=answers)), "off", [])
    assert found is not None
    assert found.json_valid == (1, 2)
    assert set(found.pace_by_kind) == {"constrained", "free"}


def test_cached_prompts_show() -> None:
    answers = (answer((1.0, 1), num_prompt=30, num_cached=10), answer((1.0, 1), num_prompt=70, num_cached=40))
    found = figures(result(a_round("off", 0, 10, answers=answers)), "off", [])
    assert found is not None
    assert found.cached_share == 0.5


def test_texts_of_two_variants_are_compared() -> None:
    said = [answer((1.0, 1), text=text) for text in "abc"]
    found = result(
        a_round("off", 0, 10, answers=(said[0], said[1])), a_round("auto", 0, 10, answers=(said[0], said[2]))
    )
    assert same_texts(found, "off", "auto") == (1, 2)


def test_counts_of_different_depths_add_up() -> None:
    total = DraftCounts(3, 5, (3,), (2,)) + DraftCounts(2, 4, (2, 2), (2, 0))
    assert total == DraftCounts(5, 9, (5, 2), (4, 0))
    assert total - DraftCounts(2, 4, (2, 2), (2, 0)) == DraftCounts(3, 5, (3, 0), (2, 0))
    assert DraftCounts().stride is None
